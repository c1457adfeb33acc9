"""What each family of networks can be told, and its own values for what it is not told.

One table serves three ends: the networks read their defaults here, an option that a network does not read is refused
instead of ignored, and `convolve train --model NAME --help` shows a family's options first. It lives beside the schema,
without torch, so that help answers at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError

EVERY_MODEL = ("model", "init_path", "variable_filter", "freeze_until")
_NORM = {"norm_type": "batch", "groups": 32, "bn_decay": 0.9, "norm_epsilon": 1e-5}
_RESNET = {**_NORM, "last_gamma_zero": True, "stride_in_1x1": False, "stage1_projection": False}


@dataclass(frozen=True)
class Family:
    """Networks that share their options; `defaults` has a value for each option, `cifar` what differs on small images.

    `summary` says in a line what sizes there are.
    """

    name: str
    summary: str
    defaults: Mapping[str, Any]
    cifar: Mapping[str, Any] = field(default_factory=dict)

    def value(self, options: ModelConfig, option: str, *, cifar: bool = False) -> Any:
        """What was asked for, or else the family's own value."""
        given = getattr(options, option)
        if given is not None:
            return given
        return self.cifar.get(option, self.defaults[option]) if cifar else self.defaults[option]


FAMILIES = {
    family.name: family
    for family in (
        Family("lenet", "lenet5, lenet-bn, lenet-sigmoid, cnn-wide", {"dropout_rate": None}),
        Family(
            "resnet",
            "ImageNet 10 14 18 26 34 50 101 152; CIFAR 8 14 20 32 44 56 110, bottleneck 11 29 38 47 56 65",
            {"model_size": "18", **_RESNET},
            {"model_size": "20", "groups": 16, "last_gamma_zero": False},
        ),
        Family(
            "resnext",
            "ImageNet 14 26 50 101 152; CIFAR 11 29 38 47 56 65",
            {"model_size": "14", **_RESNET, "convolution_groups": 32, "group_dim": 4, "widenet": False},
            {"model_size": "29", "groups": 16, "last_gamma_zero": False},
        ),
        Family(
            "efficientnet",
            "b0 to b7, and cifar for images of 32 pixels",
            {
                "model_size": "b0",
                **_NORM,
                "groups": 4,
                "expand_ratio": 6,
                "group_dim": 1,
                "se": True,
                "depth_divisor": 8,
                "top_width": 1280,
                "width_coefficient": None,
                "depth_coefficient": None,
                "use_relu": False,
                "dropout_rate": None,
                "block_survival_prob": 0.8,
                "proxy_norm": False,
                "proxy_epsilon": 0.03,
            },
        ),
        Family(
            "mobilenet",
            "v2, v3-small, v3-large",
            {"model_size": "v2", **_NORM, "groups": 8, "top_width": None, "dropout_rate": 0.2},
        ),
        Family("fastnet", "fastnet, for images of 32 pixels", {"bn_decay": 0.6, "norm_epsilon": 1e-5}),
    )
}


def family_of(model: str) -> Family | None:
    """The family that a network's name belongs to; None for networks of other packages."""
    if model == "cnn-wide":
        return FAMILIES["lenet"]
    return next((family for name, family in FAMILIES.items() if model.startswith(name)), None)


def reject_foreign_options(options: ModelConfig) -> None:
    """An option that the chosen network never reads is a mistake, not a wish."""
    family = family_of(options.model)
    if family is None:
        return
    for name, info in ModelConfig.model_fields.items():
        if name in EVERY_MODEL or name in family.defaults or getattr(options, name) == info.get_default():
            continue
        readers = [other.name for other in FAMILIES.values() if name in other.defaults]
        raise ConfigError(
            f"{name.replace('_', '-')}={getattr(options, name)} with model={options.model}: this network does not have "
            f"it ({', '.join(readers)} {'does' if len(readers) == 1 else 'do'}); leave it out"
        )
