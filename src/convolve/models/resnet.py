"""ResNet and ResNeXt, for ImageNet-sized and for small images, with torchvision's parameter names.

A size selects one of two models: on images of up to 64 pixels, a family name (`resnet`) selects the three-stage models
of He et al. 2016, section 4.2 ("CIFAR"); on larger images, the four-stage models of section 4.1.

Shortcuts of the small basic blocks have no weights (option A); all others are projections if the shape changes.
`stage1_projection` adds one to the first block of stage 1, as the Graphcore TensorFlow application does.
Stride is in the 3x3 (v1.5) unless `stride_in_1x1`. In ResNeXt the 3x3 of stage 1 has group-dim x convolution-groups
channels, which double from stage to stage.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from convolve.config.model_options import ResNetOptions, ResNeXtOptions
from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError
from convolve.layers.blocks import PaddedShortcut
from convolve.layers.chain import run_chain
from convolve.layers.init import PerLayerInit, fan_in_uniform, kaiming_normal_fan_out
from convolve.layers.norm import NormFactory
from convolve.models.spec import BuildArgs, ModelSpec

Blocks = dict[str, nn.Module]
SMALL_SIDE = 64
EXPANSION = 4


@dataclass(frozen=True)
class ResNetLayout:
    """Blocks in each stage, and the width of the first stage."""

    depths: tuple[int, ...]
    bottleneck: bool
    small: bool = False
    width: int = 64


IMAGENET = {
    "10": ResNetLayout((1, 1, 1, 1), bottleneck=False),
    "18": ResNetLayout((2, 2, 2, 2), bottleneck=False),
    "34": ResNetLayout((3, 4, 6, 3), bottleneck=False),
    "14": ResNetLayout((1, 1, 1, 1), bottleneck=True),
    "26": ResNetLayout((2, 2, 2, 2), bottleneck=True),
    "50": ResNetLayout((3, 4, 6, 3), bottleneck=True),
    "101": ResNetLayout((3, 4, 23, 3), bottleneck=True),
    "152": ResNetLayout((3, 8, 36, 3), bottleneck=True),
}

BASIC_CIFAR = {str(6 * n + 2): ResNetLayout((n, n, n), False, small=True, width=16) for n in (1, 2, 3, 5, 7, 9, 18)}
BOTTLENECK_CIFAR = {str(9 * n + 2): ResNetLayout((n, n, n), True, small=True, width=16) for n in (1, 3, 4, 5, 6, 7)}
# Two models have 56 layers; `--model-size 56` selects the bottleneck one, as in the original.
CIFAR = {**BASIC_CIFAR, **BOTTLENECK_CIFAR}


@dataclass(frozen=True)
class BlockStyle:
    """Options of all blocks of a model."""

    norms: NormFactory
    bottleneck: bool
    padded_shortcuts: bool
    stride_in_1x1: bool
    last_gamma_zero: bool
    groups: int = 1
    widening: float = 1.0


class Residual(nn.Module):
    """ReLU of the sum of branch and shortcut. Subclasses define the branch."""

    downsample: nn.Module | None

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return nn.functional.relu(self.branch(x).add_(shortcut), inplace=True)


class BasicBlock(Residual):
    """Two 3x3 convolutions."""

    def __init__(self, inputs: int, width: int, stride: int, style: BlockStyle, project: bool) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = style.norms.create(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = style.norms.create(width, zero=style.last_gamma_zero)
        self.downsample = _shortcut((inputs, width), stride, style, project)

    def branch(self, x: Tensor) -> Tensor:
        return run_chain((self.conv1, self.bn1, self.relu, self.conv2, self.bn2), x)


class Bottleneck(Residual):
    """1x1 down, 3x3 (grouped in ResNeXt), 1x1 up to four times the width."""

    def __init__(self, inputs: int, width: int, stride: int, style: BlockStyle, project: bool) -> None:
        super().__init__()
        inner, outputs = _inner_width(width, style), width * EXPANSION
        first, second = (stride, 1) if style.stride_in_1x1 else (1, stride)
        self.conv1 = _conv(inputs, inner, 1, first)
        self.bn1 = style.norms.create(inner)
        self.conv2 = _conv(inner, inner, 3, second, style.groups)
        self.bn2 = style.norms.create(inner)
        self.conv3 = _conv(inner, outputs, 1)
        self.bn3 = style.norms.create(outputs, zero=style.last_gamma_zero)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut((inputs, outputs), stride, style, project)

    def branch(self, x: Tensor) -> Tensor:
        first, second = (self.conv1, self.bn1, self.relu), (self.conv2, self.bn2, self.relu)
        return run_chain((*first, *second, self.conv3, self.bn3), x)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


def _inner_width(width: int, style: BlockStyle) -> int:
    inner = width * style.widening
    if inner % style.groups:
        raise ConfigError(
            f"--convolution-groups {style.groups}: does not divide the inner width {inner:g}; "
            "change --convolution-groups or --group-dim"
        )
    return int(inner)


def _shortcut(channels: tuple[int, int], stride: int, style: BlockStyle, project: bool) -> nn.Module | None:
    inputs, outputs = channels
    if stride == 1 and inputs == outputs and not project:
        return None
    if style.padded_shortcuts:
        return PaddedShortcut(outputs - inputs, stride)
    return nn.Sequential(_conv(inputs, outputs, 1, stride), style.norms.create(outputs))


def _stem(plan: ResNetLayout, channels: int, norms: NormFactory) -> Blocks:
    kernel, stride = (3, 1) if plan.small else (7, 2)
    width = plan.width
    blocks: Blocks = {
        "conv1": _conv(channels, width, kernel, stride),
        "bn1": norms.create(width),
        "relu": nn.ReLU(inplace=True),
    }
    if not plan.small:
        blocks["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    return blocks


def _assemble(plan: ResNetLayout, args: BuildArgs, style: BlockStyle, stage1_projection: bool) -> Blocks:
    blocks = _stem(plan, args.input_shape[0], style.norms)
    kind: Callable[..., nn.Module] = Bottleneck if style.bottleneck else BasicBlock
    inputs = plan.width
    for stage, depth in enumerate(plan.depths):
        width = plan.width * 2**stage
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            project = stage1_projection and stage == 0 and number == 0 and not style.padded_shortcuts
            blocks[f"layer{stage + 1}/{number}"] = kind(inputs, width, stride, style, project)
            inputs = width * (EXPANSION if style.bottleneck else 1)
    blocks["avgpool"] = nn.AdaptiveAvgPool2d(1)
    blocks["flatten"] = nn.Flatten()
    blocks["fc"] = nn.Linear(inputs, args.classes)
    return blocks


def _build(
    plan: ResNetLayout, family: type[ResNetOptions], args: BuildArgs, fixed: dict[str, Any] | None = None
) -> Blocks:
    options = replace(family.read(args.options, small_images=plan.small), **(fixed or {}))
    groups, group_dim = 1, plan.width
    if isinstance(options, ResNeXtOptions):
        groups, group_dim = options.convolution_groups, options.group_dim
        if plan.small and options.widenet:
            plan = replace(plan, width=plan.width * 4)
    style = BlockStyle(
        norms=NormFactory(options.norm_type, options.groups, options.norm_epsilon, options.bn_decay),
        bottleneck=plan.bottleneck,
        padded_shortcuts=plan.small and not plan.bottleneck,
        stride_in_1x1=options.stride_in_1x1,
        last_gamma_zero=options.last_gamma_zero,
        groups=groups,
        widening=groups * group_dim / plan.width,
    )
    return _assemble(plan, args, style, options.stage1_projection)


def _known_size(tables: tuple[dict[str, ResNetLayout], dict[str, ResNetLayout]], options: ModelConfig) -> str | None:
    """Return the model for small images if only they have the size; reject a size that no images have."""
    imagenet, cifar = tables
    if options.model_size is not None and options.model_size not in {**imagenet, **cifar}:
        raise ConfigError(
            f"--model-size {options.model_size} with --model {options.model}: known sizes are {_list(imagenet)} "
            f"and, for images of up to {SMALL_SIDE} pixels, {_list(cifar)}"
        )
    small = options.model_size in cifar and options.model_size not in imagenet
    return f"{options.model}{options.model_size}-cifar" if small else None


def _list(sizes: dict[str, ResNetLayout]) -> str:
    return ", ".join(sorted(sizes, key=int))


def _choose(
    family: type[ResNetOptions], tables: tuple[dict[str, ResNetLayout], dict[str, ResNetLayout]], args: BuildArgs
) -> Blocks:
    """Build the model of a family for `model_size` and the image size."""
    imagenet, cifar = tables
    small = max(args.input_shape[1:]) <= SMALL_SIDE
    sizes = cifar if small else imagenet
    size = family.read(args.options, small_images=small).model_size
    if size not in sizes:
        height, width = args.input_shape[1:]
        raise ConfigError(
            f"--model-size {size} with --model {args.name} and images of {height}x{width}: "
            f"known sizes are {_list(sizes)}"
        )
    return _build(sizes[size], family, args)


INIT_RULE = PerLayerInit(conv=kaiming_normal_fan_out, linear=fan_in_uniform, bias=fan_in_uniform)
IMAGENET_SHAPE = (3, 224, 224)
CIFAR_SHAPE = (3, 32, 32)


def _named(
    plan: ResNetLayout, family: type[ResNetOptions], summary: str, fixed: dict[str, Any] | None = None
) -> ModelSpec:
    shape, classes = (CIFAR_SHAPE, 10) if plan.small else (IMAGENET_SHAPE, 1000)
    return ModelSpec(
        lambda args: _build(plan, family, args, fixed),
        INIT_RULE,
        summary,
        input_shape=shape,
        classes=classes,
        fixed_options=("model_size", *(fixed or ())),
    )


def _bottlenecks(table: dict[str, ResNetLayout]) -> dict[str, ResNetLayout]:
    return {size: plan for size, plan in table.items() if plan.bottleneck}


def _kind(plan: ResNetLayout) -> str:
    return "bottleneck blocks" if plan.bottleneck else "basic blocks"


MODELS = {
    "resnet": ModelSpec(
        partial(_choose, ResNetOptions, (IMAGENET, CIFAR)),
        INIT_RULE,
        f"ResNet of --model-size: {ResNetOptions.sizes}",
        input_shape=IMAGENET_SHAPE,
        classes=1000,
        resolve=partial(_known_size, (IMAGENET, CIFAR)),
    ),
    "resnext": ModelSpec(
        partial(_choose, ResNeXtOptions, (_bottlenecks(IMAGENET), BOTTLENECK_CIFAR)),
        INIT_RULE,
        f"ResNeXt of --model-size: {ResNeXtOptions.sizes}",
        input_shape=IMAGENET_SHAPE,
        classes=1000,
        resolve=partial(_known_size, (_bottlenecks(IMAGENET), BOTTLENECK_CIFAR)),
    ),
    **{
        f"resnet{size}": _named(plan, ResNetOptions, f"ResNet-{size}, {_kind(plan)}") for size, plan in IMAGENET.items()
    },
    **{
        f"resnet{size}{'b' if plan.bottleneck and size in BASIC_CIFAR else ''}-cifar": _named(
            plan, ResNetOptions, f"ResNet-{size} for small images, {_kind(plan)}"
        )
        for table in (BASIC_CIFAR, BOTTLENECK_CIFAR)
        for size, plan in table.items()
    },
    **{
        f"resnext{size}-{groups}x{dim}d": _named(
            IMAGENET[size],
            ResNeXtOptions,
            f"ResNeXt-{size}, {groups} groups of {dim} channels",
            {"convolution_groups": groups, "group_dim": dim},
        )
        for size, groups, dim in (("50", 32, 4), ("101", 32, 4), ("101", 32, 8))
    },
    **{
        f"resnext{size}-cifar": _named(plan, ResNeXtOptions, f"ResNeXt-{size} for small images")
        for size, plan in BOTTLENECK_CIFAR.items()
    },
}
