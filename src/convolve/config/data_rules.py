"""Rules that join knobs of the data section. Each says what was given, which rule it breaks, and what to set."""

from convolve.config.schema import Config
from convolve.errors import ConfigError


def _partners_for_mixing(config: Config) -> None:
    data, batch = config.data, config.global_batch_size
    cutmix = data.cutmix_lambda < 1 or _is_range(config)
    needed = (4 if data.mixup_alpha else 2) if cutmix else 2 if data.mixup_alpha else 1
    if batch < needed:
        what = "mixup and cutmix" if needed == 4 else "cutmix" if cutmix else "mixup"
        raise ConfigError(f"batch-size={batch} with {what}: a step needs {needed} samples to mix; set a larger batch")


def _is_range(config: Config) -> bool:
    return (config.data.cutmix_lambda_low, config.data.cutmix_lambda_high) not in ((0.0, 0.0), (1.0, 1.0))


def _one_kind_of_cutmix(config: Config) -> None:
    data = config.data
    if data.cutmix_lambda_low > data.cutmix_lambda_high:
        raise ConfigError(
            f"cutmix-lambda-low={data.cutmix_lambda_low:g} with cutmix-lambda-high={data.cutmix_lambda_high:g}: "
            "the low end must not be above the high end"
        )
    if data.cutmix_lambda < 1 and _is_range(config):
        raise ConfigError(
            f"cutmix-lambda={data.cutmix_lambda:g} with cutmix-lambda-high={data.cutmix_lambda_high:g}: "
            "the share kept comes from one or the other; give one of them"
        )


def _cutmix_mean_within_reach(config: Config) -> None:
    """Version 1 keeps everything with probability 1.55 L - 0.96, which must be a probability."""
    data = config.data
    if data.cutmix_version == "1" and data.cutmix_lambda < 0.96 / 1.55:
        raise ConfigError(
            f"cutmix-lambda={data.cutmix_lambda:g} with cutmix-version=1: the mean share must be at least 0.62; "
            "set --cutmix-version 2 for a constant one"
        )


def _rising_ranges(config: Config) -> None:
    for name, (low, high), most in (
        ("crop-area", config.data.crop_area, 1.0),
        ("crop-aspect", config.data.crop_aspect, float("inf")),
    ):
        if not 0 < low <= high <= most:
            raise ConfigError(
                f"{name}={low:g} {high:g}: must rise from above 0" + (" to at most 1" if most == 1 else "")
            )


def _strengths_from_zero_to_one(config: Config) -> None:
    if not all(0 <= strength <= 1 for strength in config.data.colour_jitter):
        shown = " ".join(f"{strength:g}" for strength in config.data.colour_jitter)
        raise ConfigError(f"colour-jitter={shown}: strengths of brightness, contrast, saturation are 0 to 1")


DATA_RULES = (
    _one_kind_of_cutmix,
    _partners_for_mixing,
    _cutmix_mean_within_reach,
    _rising_ranges,
    _strengths_from_zero_to_one,
)
