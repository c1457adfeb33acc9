"""Options of each model family, typed and with the family's defaults. Imports no torch, so help stays fast.

`ModelConfig` declares range and help of every option, with None for "not given". A class here lists the options that a
family has. From it, models read typed values, `--model NAME --help` lists a family's options first, and an option that
the chosen model does not have is rejected instead of ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from convolve.config.schema import ModelConfig, NormType, Padding
from convolve.errors import ConfigError

COMMON_OPTIONS = (
    "model",
    "weights",
    "weights_dir",
    "weights_mirror",
    "variable_filter",
    "freeze_until",
    "freeze_norms",
    "fit_head",
)
Options = TypeVar("Options", bound="FamilyOptions")


@dataclass(frozen=True)
class FamilyOptions:
    """Options of one family. None means that the size of the model decides.

    `sizes` is a summary of the sizes; `small_image_defaults` are the defaults that differ on small images.
    """

    family: ClassVar[str]
    sizes: ClassVar[str]
    small_image_defaults: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def read(cls: type[Options], config: ModelConfig, *, small_images: bool = False) -> Options:
        """Return the options of a config, with the family's defaults for those that were not given."""
        defaults = dict(cls.small_image_defaults) if small_images else {}
        explicit = {name: getattr(config, name) for name in cls.names() if getattr(config, name) is not None}
        return cls(**{**defaults, **explicit})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the options."""
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True)
class LeNetOptions(FamilyOptions):
    """LeNet and its relatives."""

    family = "lenet"
    sizes = "lenet5, lenet-bn, lenet-sigmoid, cnn-wide"

    dropout_rate: float | None = None


@dataclass(frozen=True)
class NormOptions(FamilyOptions):
    """Kind of norm, shared by several families."""

    norm_type: NormType = "batch"
    groups: int = 32


@dataclass(frozen=True)
class ResNetOptions(NormOptions):
    """ResNet."""

    family = "resnet"
    sizes = "ImageNet 10 14 18 26 34 50 101 152; CIFAR 8 14 20 32 44 56 110, bottleneck 11 29 38 47 56 65"
    small_image_defaults = {"model_size": "20", "groups": 16, "last_gamma_zero": False}

    model_size: str = "18"
    bn_decay: float = 0.9
    norm_epsilon: float = 1e-5
    last_gamma_zero: bool = True
    stride_in_1x1: bool = False
    stage1_projection: bool = False


@dataclass(frozen=True)
class ResNeXtOptions(ResNetOptions):
    """ResNeXt."""

    family = "resnext"
    sizes = "ImageNet 14 26 50 101 152; CIFAR 11 29 38 47 56 65"
    small_image_defaults = {"model_size": "29", "groups": 16, "last_gamma_zero": False}

    model_size: str = "14"
    convolution_groups: int = 32
    group_dim: int = 4
    widenet: bool = False


@dataclass(frozen=True)
class EfficientNetOptions(NormOptions):
    """EfficientNet."""

    family = "efficientnet"
    sizes = "b0 to b7, and cifar for images of 32 pixels"

    model_size: str = "b0"
    groups: int = 4
    bn_decay: float | None = None
    norm_epsilon: float | None = None
    conv_padding: Padding = "symmetric"
    expand_ratio: int = 6
    group_dim: int = 1
    se: bool = True
    depth_divisor: int = 8
    top_width: int = 1280
    width_coefficient: float | None = None
    depth_coefficient: float | None = None
    use_relu: bool = False
    dropout_rate: float | None = None
    block_survival_prob: float = 0.8
    proxy_norm: bool = False
    proxy_epsilon: float = 0.03


@dataclass(frozen=True)
class EfficientNetLiteOptions(NormOptions):
    """EfficientNet-Lite."""

    family = "efficientnet-lite"
    sizes = "0 to 4"

    model_size: str = "0"
    groups: int = 4
    bn_decay: float = 0.99
    norm_epsilon: float = 1e-3
    conv_padding: Padding = "same"
    dropout_rate: float | None = None
    block_survival_prob: float = 0.8


@dataclass(frozen=True)
class MobileNetOptions(NormOptions):
    """MobileNet."""

    family = "mobilenet"
    sizes = "v2, v3-small, v3-large"

    model_size: str = "v2"
    groups: int = 8
    bn_decay: float | None = None
    norm_epsilon: float | None = None
    conv_padding: Padding = "symmetric"
    top_width: int | None = None
    dropout_rate: float = 0.2


@dataclass(frozen=True)
class FastNetOptions(FamilyOptions):
    """Fastnet."""

    family = "fastnet"
    sizes = "fastnet, for images of 32 pixels"

    bn_decay: float = 0.6
    norm_epsilon: float = 1e-5


FAMILIES: dict[str, type[FamilyOptions]] = {
    kind.family: kind
    for kind in (
        LeNetOptions,
        ResNetOptions,
        ResNeXtOptions,
        EfficientNetOptions,
        EfficientNetLiteOptions,
        MobileNetOptions,
        FastNetOptions,
    )
}


def family_of(model: str) -> type[FamilyOptions] | None:
    """Return the options of the family of a model; None for models of other packages."""
    if ":" in model:
        return None
    if model == "cnn-wide":
        return LeNetOptions
    names = [name for name in FAMILIES if model.startswith(name)]
    return FAMILIES[max(names, key=len)] if names else None


def reject_foreign_options(config: ModelConfig) -> None:
    """Raise if an option was given that the model does not have."""
    family = family_of(config.model)
    known = family.names() if family else ()
    if family is None and ":" not in config.model:
        return
    for name in ModelConfig.model_fields:
        value = getattr(config, name)
        if name in COMMON_OPTIONS or name in known or value is None:
            continue
        owners = ", ".join(other.family for other in FAMILIES.values() if name in other.names())
        raise ConfigError(
            f"--{name.replace('_', '-')} {value}: {config.model} has no such option, only {owners}; omit it"
        )
