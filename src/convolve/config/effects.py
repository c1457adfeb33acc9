"""Options given on the command line or in a call that would have no effect. Each is an error that names the reason.

Only options of the user are checked: a named config may set an option that another one, given on top, makes pointless.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from convolve.config.schema import Config
from convolve.config.user_names import find_ineffective
from convolve.errors import ConfigError

_WITHOUT_MOMENTUM = ("sgd", "adam", "adamw")
_RULES_WITH_OWN_SCALE = ("dynamic", "ascend")
_IN_16_BITS = {
    "enable_half_partials": "fp32 accumulates in fp32",
    "stochastic_rounding": "fp32 results are not rounded",
    "saturate_on_overflow": "fp32 keeps its range",
}


def reject_ineffective(config: Config, given: Mapping[str, Any]) -> None:
    """Raise for the first of these options that has no effect in the config."""
    for find in (_find_16_bit_options, _find_loss_scales, _find_momentum, _find_teacher, find_ineffective):
        for problem in find(config, given):
            raise ConfigError(problem)


def computes_in_fp32(config: Config) -> bool:
    """Return whether the number formats of a config are fp32; every device model has 16 bits."""
    precision = config.precision
    if precision.precision_mode is not None:
        return precision.precision_mode == "must_keep_origin_dtype"
    return precision.precision == "32.32" or (precision.precision is None and precision.device_model is None)


def _find_16_bit_options(config: Config, given: Mapping[str, Any]) -> Iterator[str]:
    if computes_in_fp32(config):
        for option, reason in _IN_16_BITS.items():
            if option in given and getattr(config.precision, option):
                flag = option.replace("_", "-")
                yield f"--{flag}: has no effect, {reason}; add --precision 16.16 or 16.32, or omit it"


def _find_loss_scales(config: Config, given: Mapping[str, Any]) -> Iterator[str]:
    precision, rule = config.precision, config.precision.loss_scaling_rule
    initial = precision.initial_loss_scaling if "initial_loss_scaling" in given else None
    constant = precision.loss_scaling if "loss_scaling" in given else None
    changing = precision.device_model == "ascend-910" and precision.loss_scaling is None
    if initial is not None and rule == "static" and not changing:
        yield (
            f"--initial-loss-scaling {initial:g}: has no effect, the loss scale is constant; add --loss-scaling N to "
            "rise to it, or --loss-scaling-rule dynamic"
        )
    if constant is not None and rule in _RULES_WITH_OWN_SCALE:
        yield (
            f"--loss-scaling {constant:g} with --loss-scaling-rule {rule}: has no effect, the rule finds the scale; "
            "use --initial-loss-scaling for the first one, or omit it"
        )
    if constant is not None and initial is not None and rule == "automatic":
        yield (
            f"--loss-scaling {constant:g} with --initial-loss-scaling {initial:g}: both are the first scale of the "
            "automatic rule; omit one"
        )


def _find_momentum(config: Config, given: Mapping[str, Any]) -> Iterator[str]:
    momentum, optimizer = config.optim.momentum, config.optim.optimizer
    if "momentum" in given and momentum and optimizer in _WITHOUT_MOMENTUM:
        remedy = "use --adam-betas" if optimizer != "sgd" else "use --optimizer momentum or omit --momentum"
        yield f"--momentum {momentum:g} with --optimizer {optimizer}: has no effect; {remedy}"


def _find_teacher(config: Config, given: Mapping[str, Any]) -> Iterator[str]:
    if config.optim.teacher is None:
        for option in ("teacher_weight", "teacher_temperature"):
            if option in given:
                flag, value = option.replace("_", "-"), getattr(config.optim, option)
                yield f"--{flag} {value:g}: has no effect; add --teacher RUN or omit it"
