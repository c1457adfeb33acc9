"""EfficientNet B0 to B7 and a size for small images, with torchvision's parameter names.

Blocks are those of Tan and Le 2019: expand by 1x1, a depthwise k x k, squeeze and excitation, project by 1x1, with a
shortcut if the shape stays. `group_dim` above 1 turns the depthwise convolution into a grouped one with that many
channels in each group, which suits vector processors (Masters et al. 2021), usually together with `expand_ratio` 4.
The stochastic depth rate increases from 0 at the first block to 1 - `block_survival_prob` at the last.

Epsilons, decays and padding follow torchvision (1e-5 and 0.9 up to B4, 1e-3 and 0.99 above; symmetric). TensorFlow's
models have 1e-3 and padding "same" everywhere (--norm-epsilon, --conv-padding).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from convolve.config.model_options import EfficientNetOptions
from convolve.config.schema import ModelConfig, Padding
from convolve.errors import ConfigError
from convolve.layers.blocks import Activation, SqueezeExcitation, conv_norm, round_width
from convolve.layers.dropout import KeyedDropout, StochasticDepth
from convolve.layers.init import PerLayerInit, glorot_uniform, kaiming_normal_fan_out, zeros
from convolve.layers.norm import NormFactory
from convolve.models.spec import BuildArgs, ModelSpec

Blocks = dict[str, nn.Module]


@dataclass(frozen=True)
class Size:
    """Width and depth coefficients, dropout, and image side of a model size."""

    width: float
    depth: float
    dropout: float
    side: int
    small: bool = False
    epsilon: float = 1e-5
    bn_decay: float = 0.9


SIZES = {
    "cifar": Size(0.5, 1.0, 0.0, 32, small=True),
    "b0": Size(1.0, 1.0, 0.2, 224),
    "b1": Size(1.0, 1.1, 0.2, 240),
    "b2": Size(1.1, 1.2, 0.3, 260),
    "b3": Size(1.2, 1.4, 0.3, 300),
    "b4": Size(1.4, 1.8, 0.4, 380),
    "b5": Size(1.6, 2.2, 0.4, 456, epsilon=1e-3, bn_decay=0.99),
    "b6": Size(1.8, 2.6, 0.5, 528, epsilon=1e-3, bn_decay=0.99),
    "b7": Size(2.0, 3.1, 0.5, 600, epsilon=1e-3, bn_decay=0.99),
}


@dataclass(frozen=True)
class BlockGroup:
    """A row of the paper's table 1."""

    kernel: int
    repeats: int
    width: int
    stride: int
    expands: bool = True


GROUPS = (
    BlockGroup(3, 1, 16, 1, expands=False),
    BlockGroup(3, 2, 24, 2),
    BlockGroup(5, 2, 40, 2),
    BlockGroup(3, 3, 80, 2),
    BlockGroup(5, 3, 112, 1),
    BlockGroup(5, 4, 192, 2),
    BlockGroup(3, 1, 320, 1),
)

STEM = 32


@dataclass(frozen=True)
class BlockStyle:
    """Options of all blocks of a model."""

    norms: NormFactory
    activation: Activation
    expand_ratio: int
    group_dim: int
    se: bool
    padding: Padding = "symmetric"


@dataclass(frozen=True)
class BlockPosition:
    """Shape of one block, its name, and the probability that its branch is kept."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    expands: bool
    survival: float
    name: str


class MBConv(nn.Module):
    """Expand, depthwise or grouped convolution, gate, project; added to the input if the shape stays."""

    def __init__(self, position: BlockPosition, style: BlockStyle) -> None:
        super().__init__()
        inputs, norms = position.inputs, style.norms
        hidden = inputs * style.expand_ratio if position.expands else inputs
        layers: list[nn.Module] = []
        if hidden != inputs:
            layers.append(conv_norm((inputs, hidden), 1, norms, activation=style.activation))
        layers.append(
            conv_norm(
                (hidden, hidden),
                position.kernel,
                norms,
                stride=position.stride,
                groups=_count_groups(hidden, style.group_dim),
                activation=style.activation,
                padding=style.padding,
            )
        )
        squeezed = max(1, inputs // 4)
        gate = SqueezeExcitation(hidden, squeezed, style.activation(), nn.Sigmoid()) if style.se else nn.Identity()
        self.block = nn.Sequential(*layers, gate, conv_norm((hidden, position.outputs), 1, norms))
        self.skips = position.stride == 1 and inputs == position.outputs
        kept = position.survival >= 1 or not self.skips
        self.stochastic_depth = nn.Identity() if kept else StochasticDepth(position.survival, position.name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return self.stochastic_depth(out) + x if self.skips else out


def _count_groups(channels: int, group_dim: int) -> int:
    groups = max(1, channels // group_dim)
    if channels % groups:
        raise ConfigError(
            f"--group-dim {group_dim} with a layer of {channels} channels: {groups} groups do not divide it; "
            "choose a divisor of the widths, for example 1, 4, 8 or 16"
        )
    return groups


def read_size(options: ModelConfig) -> str:
    """Return the size that the options select; `4`, `B4` and `b4` are the same."""
    size = EfficientNetOptions.read(options).model_size.lower()
    size = f"b{size}" if size.isdigit() else size
    if size not in SIZES:
        raise ConfigError(
            f"--model-size {options.model_size} with --model efficientnet: known sizes are {', '.join(SIZES)}"
        )
    return size


def _assemble(name: str, args: BuildArgs) -> Blocks:
    size = SIZES[name]
    options = EfficientNetOptions.read(args.options)
    width = partial(_width, options.width_coefficient or size.width, options.depth_divisor)
    style = _style(size, options)
    blocks: Blocks = {
        "features/0": conv_norm(
            (args.input_shape[0], width(STEM)),
            3,
            style.norms,
            stride=1 if size.small else 2,
            activation=style.activation,
            padding=style.padding,
        )
    }
    depth = options.depth_coefficient or size.depth
    inputs = width(STEM)
    for name, position in _positions(size, depth, width, options.block_survival_prob):
        blocks[name] = MBConv(position, style)
        inputs = position.outputs
    return {**blocks, **_head(size, inputs, width, style, args)}


def _width(coefficient: float, divisor: int, width: int) -> int:
    return round_width(width * coefficient, divisor)


def _style(size: Size, options: EfficientNetOptions) -> BlockStyle:
    if options.proxy_norm and options.norm_type not in ("group", "layer"):
        raise ConfigError(
            f"--proxy-norm with --norm-type {options.norm_type}: needs a norm that ignores the batch; "
            "set --norm-type group or layer"
        )
    norms = NormFactory(
        options.norm_type,
        options.groups,
        options.norm_epsilon or size.epsilon,
        size.bn_decay if options.bn_decay is None else options.bn_decay,
        clip=True,
        proxy_epsilon=options.proxy_epsilon if options.proxy_norm else None,
    )
    activation: Activation = partial(nn.ReLU if options.use_relu else nn.SiLU)
    return BlockStyle(
        norms, activation, options.expand_ratio, options.group_dim, options.se, padding=options.conv_padding
    )


def _positions(size: Size, depth: float, width: Any, survival: float) -> list[tuple[str, BlockPosition]]:
    repeats = [math.ceil(group.repeats * depth) for group in GROUPS]
    positions: list[tuple[str, BlockPosition]] = []
    inputs = width(STEM)
    for number, (group, count) in enumerate(zip(GROUPS, repeats, strict=True), start=1):
        first_stride = 1 if size.small and number == 2 else group.stride
        for index in range(count):
            name = f"features/{number}/{index}"
            keep = 1 - (1 - survival) * len(positions) / sum(repeats)
            stride, outputs = (first_stride if index == 0 else 1), width(group.width)
            positions.append((name, BlockPosition(inputs, outputs, group.kernel, stride, group.expands, keep, name)))
            inputs = outputs
    return positions


def _head(size: Size, inputs: int, width: Any, style: BlockStyle, args: BuildArgs) -> Blocks:
    options = EfficientNetOptions.read(args.options)
    blocks: Blocks = {}
    if options.top_width:
        outputs = width(options.top_width)
        blocks[f"features/{len(GROUPS) + 1}"] = conv_norm(
            (inputs, outputs), 1, style.norms, activation=style.activation
        )
        inputs = outputs
    blocks["avgpool"] = nn.AdaptiveAvgPool2d(1)
    blocks["flatten"] = nn.Flatten()
    rate = size.dropout if options.dropout_rate is None else options.dropout_rate
    if rate > 0:
        blocks["classifier/0"] = KeyedDropout(rate, "classifier/0")
    blocks["classifier/1"] = nn.Linear(inputs, args.classes)
    return blocks


INIT_RULE = PerLayerInit(conv=kaiming_normal_fan_out, linear=glorot_uniform, bias=zeros)


def _named(name: str, size: Size) -> ModelSpec:
    summary = (
        "EfficientNet for small images" if size.small else f"EfficientNet-{name.upper()}, made for {size.side} pixels"
    )
    return ModelSpec(
        partial(_assemble, name),
        INIT_RULE,
        summary,
        input_shape=(3, size.side, size.side),
        classes=10 if size.small else 1000,
        fixed_options=("model_size",),
    )


MODELS = {
    "efficientnet": ModelSpec(
        lambda args: _assemble(read_size(args.options), args),
        INIT_RULE,
        f"EfficientNet of --model-size: {EfficientNetOptions.sizes}",
        input_shape=(3, 224, 224),
        classes=1000,
        resolve=lambda options: f"efficientnet-{read_size(options)}",
    ),
    **{f"efficientnet-{name}": _named(name, size) for name, size in SIZES.items()},
}
