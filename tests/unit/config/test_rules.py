import pytest

from convolve.config.loading import resolve
from convolve.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mixup_alpha": 0.2, "batch_size": 1}, "--batch-size 1 with mixup: a step needs 2 samples"),
        ({"cutmix_lambda": 0.8, "batch_size": 1}, "--batch-size 1 with cutmix: a step needs 2 samples"),
        ({"cutmix_lambda": 0.8, "mixup_alpha": 1, "batch_size": 3}, "mixup and cutmix: a step needs 4 samples"),
        ({"cutmix_lambda": 1.2}, "--cutmix-lambda 1.2: must be less than or equal to 1"),
        ({"cutmix_lambda": 0.5}, "the mean fraction must be at least 0.62"),
        ({"cutmix_lambda_low": 0.6, "cutmix_lambda_high": 0.4}, "low must not exceed high"),
        ({"cutmix_lambda": 0.8, "cutmix_lambda_high": 0.4}, "both set the fraction kept; omit one"),
        ({"crop_area": (0.5, 1.5)}, "--crop-area 0.5 1.5: must rise from above 0 to at most 1"),
        ({"crop_aspect": (2, 1)}, "--crop-aspect 2 1: must rise"),
        ({"color_jitter": (0.4, 2, 0)}, "--color-jitter 0.4 2 0: brightness"),
        ({"augment": "crop"}, "--augment crop: must be"),
    ],
)
def test_an_impossible_combination_is_named_before_any_work_starts(given, message):
    with pytest.raises(ConfigError, match=message):
        resolve("lenet-mnist", None, given)


def test_accumulation_gives_single_samples_their_partners():
    config = resolve("lenet-mnist", None, {"mixup_alpha": 0.2, "batch_size": 1, "gradient_accumulation_count": 2})
    assert config.config.global_batch_size == 2
