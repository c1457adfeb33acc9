"""Rules across options: for each rule a config that breaks it, with the whole message, and one just inside it."""

import pytest

from convolve.config.loading import build, resolve
from convolve.errors import ConfigError

MESSAGES = {
    "both kinds of random data": (
        {"generated_data": True, "synthetic_data": True},
        "--generated-data with --synthetic-data: images come either from the host (generated) or from the device "
        "(synthetic); omit one",
    ),
    "decreasing milestones": (
        {"learning_rate_schedule": (0.75, 0.5)},
        "--learning-rate-schedule 0.75 0.5: milestones must be increasing fractions of the run between 0 and 1, such "
        "as 0.5 0.75",
    ),
    "milestone at the end": (
        {"learning_rate_schedule": (0.5, 1.0)},
        "--learning-rate-schedule 0.5 1.0: milestones must be increasing fractions of the run between 0 and 1, such as "
        "0.5 0.75",
    ),
    "milestone at the start": (
        {"learning_rate_schedule": (0.0,)},
        "--learning-rate-schedule 0.0: milestones must be increasing fractions of the run between 0 and 1, such as "
        "0.5 0.75",
    ),
    "warm-up as long as the run": (
        {"epochs": 2.5, "warmup_epochs": 2.5},
        "--warmup-epochs 2.5 with --epochs 2.5: the warm-up must end before the run",
    ),
    "nesterov without momentum": (
        {"nesterov": True, "optimizer": "adam"},
        "--nesterov with --optimizer adam: is a form of momentum; set --optimizer momentum",
    ),
    "misspelled schedule": (
        {"lr_schedule": "cosin"},
        "--lr-schedule cosin: unknown schedule; did you mean cosine?",
    ),
    "trapezoid longer than the run": (
        {"lr_schedule": "trapezoid", "rise_share": 0.5, "fall_share": 0.6},
        "--rise-share 0.5 with --fall-share 0.6: the sum exceeds 1, the whole run; lower one",
    ),
    "negative decay of rmsprop": (
        {"rmsprop_base_decay_exp": -5, "batch_size": 64},
        "--rmsprop-base-decay-exp -5 with a global batch of 64: the decay of -1 must not be negative; lower one",
    ),
    "averages without checkpoints": (
        {"weight_avg_n": (2,), "checkpoints": False},
        "--weight-avg-n or --weight-avg-exp with --no-checkpoints: averages need checkpoints; omit --no-checkpoints",
    ),
    "average of no checkpoint": (
        {"weight_avg_n": (2, 0)},
        "--weight-avg-n 2 0 --weight-avg-exp : counts must be at least 1, decays in [0, 1)",
    ),
    "average that never moves": (
        {"weight_avg_exp": (1.0,)},
        "--weight-avg-n  --weight-avg-exp 1.0: counts must be at least 1, decays in [0, 1)",
    ),
    "two policies": (
        {"precision_mode": "force_fp16", "precision": "16.16"},
        "--precision-mode force_fp16 with --precision 16.16: both set the number formats; omit one",
    ),
    "mix list without its mode": (
        {"mixlist_file": "ops.json", "precision_mode": "force_fp16"},
        "--mixlist-file ops.json: has no effect; add --precision-mode allow_mix_precision",
    ),
    "falling ramp": (
        {"loss_scaling_rule": "ramp", "initial_loss_scaling": 256, "loss_scaling": 64},
        "--initial-loss-scaling 256 with --loss-scaling 64: a ramp must rise; lower the first",
    ),
    "ramp that starts above the default": (
        {"loss_scaling_rule": "ramp", "initial_loss_scaling": 129},
        "--initial-loss-scaling 129 with --loss-scaling 128: a ramp must rise; lower the first",
    ),
    "span that does not divide the replicas": (
        {"bn_span": 4, "replicas": 6},
        "--bn-span 4 with --replicas 6: must divide the number of replicas; choose a divisor of 6",
    ),
    "span that skips samples": (
        {"bn_span": 2, "replicas": 2, "bad_samples": "skip"},
        "--bad-samples skip with --bn-span 2: replicas of a span wait for each other's micro batches, but "
        "one without readable samples is skipped; remove bad samples (`convolve data check` lists them)",
    ),
    "repeated split": (
        {"shards": 3, "pipeline_splits": ("conv2", "conv2")},
        "--pipeline-splits conv2 conv2: a block can start only one stage; name each once",
    ),
    "recompute checkpoints without recomputation": (
        {"recompute_checkpoints": ("layer*",)},
        "--recompute-checkpoints: has no effect; add --enable-recomputation",
    ),
    "mixup of one sample": (
        {"mixup_alpha": 0.2, "batch_size": 1},
        "--batch-size 1 with mixup: a step needs 2 samples; set a larger batch",
    ),
    "cutmix of one sample": (
        {"cutmix_lambda": 0.8, "batch_size": 1},
        "--batch-size 1 with cutmix: a step needs 2 samples; set a larger batch",
    ),
    "uniform cutmix of one sample": (
        {"cutmix_lambda_low": 0.2, "cutmix_lambda_high": 0.8, "batch_size": 1},
        "--batch-size 1 with cutmix: a step needs 2 samples; set a larger batch",
    ),
    "mixup and cutmix of three samples": (
        {"cutmix_lambda": 0.8, "mixup_alpha": 1, "batch_size": 3},
        "--batch-size 3 with mixup and cutmix: a step needs 4 samples; set a larger batch",
    ),
    "cutmix range upside down": (
        {"cutmix_lambda_low": 0.6, "cutmix_lambda_high": 0.4},
        "--cutmix-lambda-low 0.6 with --cutmix-lambda-high 0.4: low must not exceed high",
    ),
    "both kinds of cutmix": (
        {"cutmix_lambda": 0.8, "cutmix_lambda_high": 0.4},
        "--cutmix-lambda 0.8 with --cutmix-lambda-high 0.4: both set the fraction kept; omit one",
    ),
    "cutmix mean out of reach": (
        {"cutmix_lambda": 0.61},
        "--cutmix-lambda 0.61 with --cutmix-version 1: the mean fraction must be at least 0.62; set --cutmix-version 2 "
        "for a constant one",
    ),
    "crop larger than the image": (
        {"crop_area": (0.5, 1.5)},
        "--crop-area 0.5 1.5: must rise from above 0 to at most 1",
    ),
    "empty crop": ({"crop_area": (0, 1)}, "--crop-area 0 1: must rise from above 0 to at most 1"),
    "falling aspect": ({"crop_aspect": (2, 1)}, "--crop-aspect 2 1: must rise from above 0"),
    "jitter above one": (
        {"color_jitter": (0.4, 2, 0)},
        "--color-jitter 0.4 2 0: brightness, contrast and saturation must be 0 to 1",
    ),
}


@pytest.mark.parametrize(("options", "message"), MESSAGES.values(), ids=MESSAGES)
def test_a_broken_rule_is_one_line_with_options_problem_and_remedy(options, message):
    with pytest.raises(ConfigError) as caught:
        build(options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "options",
    [
        {"generated_data": True},
        {"synthetic_data": True},
        {"learning_rate_schedule": ()},
        {"learning_rate_schedule": (0.001, 0.5, 0.5, 0.999)},
        {"epochs": 2.5, "warmup_epochs": 2.4},
        {"iterations": 3, "warmup_epochs": 2},
        {"nesterov": True, "optimizer": "momentum"},
        {"nesterov": True, "optimizer": "sgd_combined"},
        {"lr_schedule": "onecycle"},
        {"lr_schedule": "trapezoid", "rise_share": 0.5, "fall_share": 0.5},
        {"lr_schedule": "onecycle", "rise_share": 0.5, "fall_share": 0.6},
        {"rmsprop_base_decay_exp": -6, "batch_size": 64},
        {"weight_avg_n": (1,), "weight_avg_exp": (0.0, 0.99)},
        {"checkpoints": False},
        {"precision_mode": "allow_mix_precision", "mixlist_file": "ops.json"},
        {"precision": "16.16"},
        {"loss_scaling_rule": "ramp", "initial_loss_scaling": 64, "loss_scaling": 64},
        {"loss_scaling_rule": "dynamic", "initial_loss_scaling": 256, "loss_scaling": 64},
        {"bn_span": 3, "replicas": 6},
        {"shards": 3, "pipeline_splits": ("conv2", "fc1")},
        {"recompute_checkpoints": ("layer*",), "enable_recomputation": True},
        {"mixup_alpha": 0.2, "batch_size": 2},
        {"cutmix_lambda": 0.8, "mixup_alpha": 1, "batch_size": 4},
        {"cutmix_lambda_low": 0.4, "cutmix_lambda_high": 0.4},
        {"cutmix_lambda_low": 1.0, "cutmix_lambda_high": 1.0, "cutmix_lambda": 0.8},
        {"cutmix_lambda": 0.62},
        {"cutmix_lambda": 0.1, "cutmix_version": 2},
        {"crop_area": (1.0, 1.0), "crop_aspect": (1.0, 9.0)},
        {"color_jitter": (0.0, 1.0, 0.5)},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_options_at_the_limit_of_a_rule_are_accepted(options):
    values = build(options).values()
    assert values.keys() >= options.keys()


@pytest.mark.parametrize(
    ("more", "global_batch_size"),
    [
        ({"gradient_accumulation_count": 2}, 2),
        ({"replicas": 3}, 3),
        ({"gradient_accumulation_count": 2, "replicas": 2}, 4),
    ],
)
def test_mixing_needs_partners_in_the_global_batch_not_in_the_micro_batch(more, global_batch_size):
    config = resolve("lenet-mnist", None, {"mixup_alpha": 0.2, "batch_size": 1, **more}).config
    assert config.global_batch_size == global_batch_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutmix_lambda": 1.2}, "--cutmix-lambda 1.2: must be less than or equal to 1"),
        ({"validation_views": 3}, "--validation-views 3: must be 1, 2 or 6"),
        ({"momentum": 1}, "--momentum 1: must be less than 1"),
        ({"crop_area": (0.1, 0.2, 0.3)}, "--crop-area (0.1, 0.2, 0.3): Tuple should have at most 2 items"),
        ({"seed": -1}, "--seed -1: must be greater than or equal to 0"),
        ({"seed": 2**63}, f"--seed {2**63}: must be less than {2**63}"),
        ({"batch_size": 2.5}, "--batch-size 2.5: must be a valid integer"),
        ({"logs": "maybe"}, "--logs maybe: must be a valid boolean"),
        ({"half_type": "fp8"}, "--half-type fp8: must be 'fp16' or 'bf16'"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_names_the_option_and_the_range(options, message):
    with pytest.raises(ConfigError) as caught:
        build(options)
    assert str(caught.value).startswith(message)


def test_the_first_broken_rule_is_reported_in_a_fixed_order():
    options = {"nesterov": True, "bn_span": 2, "color_jitter": (2, 0, 0)}
    for name in ("color_jitter", "nesterov", "bn_span"):
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} "):
            build(options)
        del options[name]
    build(options)
