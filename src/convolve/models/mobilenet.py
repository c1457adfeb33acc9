"""MobileNet v2, v3-small and v3-large, with torchvision's parameter names.

The tables are those of Sandler et al. 2018 and Howard et al. 2019. Graphcore's v3-small has 1280 units before the
classifier and torchvision's 1024; `top_width` sets them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Generator, Tensor, nn

from convolve.config.model_options import MobileNetOptions
from convolve.config.schema import ModelConfig, Padding
from convolve.errors import ConfigError
from convolve.layers.blocks import Activation, SqueezeExcitation, conv_norm, round_width
from convolve.layers.dropout import KeyedDropout
from convolve.layers.init import Fans, PerLayerInit, kaiming_normal_fan_out, zeros
from convolve.layers.norm import NormFactory
from convolve.models.spec import BuildArgs, ModelSpec

Blocks = dict[str, nn.Module]


@dataclass(frozen=True)
class BlockRow:
    """One block: widths inside and after it."""

    kernel: int
    hidden: int
    outputs: int
    se: bool
    hard: bool
    stride: int


LARGE = (
    BlockRow(3, 16, 16, False, False, 1),
    BlockRow(3, 64, 24, False, False, 2),
    BlockRow(3, 72, 24, False, False, 1),
    BlockRow(5, 72, 40, True, False, 2),
    BlockRow(5, 120, 40, True, False, 1),
    BlockRow(5, 120, 40, True, False, 1),
    BlockRow(3, 240, 80, False, True, 2),
    BlockRow(3, 200, 80, False, True, 1),
    BlockRow(3, 184, 80, False, True, 1),
    BlockRow(3, 184, 80, False, True, 1),
    BlockRow(3, 480, 112, True, True, 1),
    BlockRow(3, 672, 112, True, True, 1),
    BlockRow(5, 672, 160, True, True, 2),
    BlockRow(5, 960, 160, True, True, 1),
    BlockRow(5, 960, 160, True, True, 1),
)

SMALL = (
    BlockRow(3, 16, 16, True, False, 2),
    BlockRow(3, 72, 24, False, False, 2),
    BlockRow(3, 88, 24, False, False, 1),
    BlockRow(5, 96, 40, True, True, 2),
    BlockRow(5, 240, 40, True, True, 1),
    BlockRow(5, 240, 40, True, True, 1),
    BlockRow(5, 120, 48, True, True, 1),
    BlockRow(5, 144, 48, True, True, 1),
    BlockRow(5, 288, 96, True, True, 2),
    BlockRow(5, 576, 96, True, True, 1),
    BlockRow(5, 576, 96, True, True, 1),
)

# Expansion, width, repeats, stride of the first.
V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class _Skipping(nn.Module):
    """Base of blocks that add their input if the shape stays."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips

    def join(self, x: Tensor, out: Tensor) -> Tensor:
        return out + x if self.skips else out


class InvertedResidual(_Skipping):
    """A block of v2: expand, depthwise, linear projection."""

    def __init__(
        self, channels: tuple[int, int], expansion: int, stride: int, norms: NormFactory, padding: Padding
    ) -> None:
        inputs, outputs = channels
        super().__init__(stride == 1 and inputs == outputs)
        hidden = inputs * expansion
        relu6: Activation = nn.ReLU6
        expand = [conv_norm((inputs, hidden), 1, norms, activation=relu6)] if expansion != 1 else []
        self.conv = nn.Sequential(
            *expand,
            conv_norm((hidden, hidden), 3, norms, stride=stride, groups=hidden, activation=relu6, padding=padding),
            *conv_norm((hidden, outputs), 1, norms),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, self.conv(x))


class GatedResidual(_Skipping):
    """A block of v3: expand, depthwise, squeeze and excitation, linear projection."""

    def __init__(self, inputs: int, row: BlockRow, norms: NormFactory, padding: Padding) -> None:
        super().__init__(row.stride == 1 and inputs == row.outputs)
        hidden = row.hidden
        activation: Activation = nn.Hardswish if row.hard else nn.ReLU
        expand = [conv_norm((inputs, hidden), 1, norms, activation=activation)] if hidden != inputs else []
        gate = [SqueezeExcitation(hidden, round_width(hidden // 4), nn.ReLU(), nn.Hardsigmoid())] if row.se else []
        self.block = nn.Sequential(
            *expand,
            conv_norm(
                (hidden, hidden),
                row.kernel,
                norms,
                stride=row.stride,
                groups=hidden,
                activation=activation,
                padding=padding,
            ),
            *gate,
            conv_norm((hidden, row.outputs), 1, norms),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, self.block(x))


def _norms(args: BuildArgs, epsilon: float, decay: float) -> NormFactory:
    options = MobileNetOptions.read(args.options)
    return NormFactory(
        options.norm_type,
        options.groups,
        options.norm_epsilon or epsilon,
        decay if options.bn_decay is None else options.bn_decay,
        clip=True,
    )


def _dropout(args: BuildArgs, name: str) -> nn.Module:
    return KeyedDropout(MobileNetOptions.read(args.options).dropout_rate, name)


def _assemble_v2(args: BuildArgs) -> Blocks:
    norms, padding = _norms(args, 1e-5, 0.9), MobileNetOptions.read(args.options).conv_padding
    stem = conv_norm((args.input_shape[0], 32), 3, norms, stride=2, activation=nn.ReLU6, padding=padding)
    blocks: Blocks = {"features/0": stem}
    inputs = 32
    for expansion, width, repeats, first_stride in V2:
        for index in range(repeats):
            stride = first_stride if index == 0 else 1
            blocks[f"features/{len(blocks)}"] = InvertedResidual((inputs, width), expansion, stride, norms, padding)
            inputs = width
    top = args.options.top_width or 1280
    blocks[f"features/{len(blocks)}"] = conv_norm((inputs, top), 1, norms, activation=nn.ReLU6)
    blocks["avgpool"] = nn.AdaptiveAvgPool2d(1)
    blocks["flatten"] = nn.Flatten()
    blocks["classifier/0"] = _dropout(args, "classifier/0")
    blocks["classifier/1"] = nn.Linear(top, args.classes)
    return blocks


def _assemble_v3(rows: tuple[BlockRow, ...], top: int, args: BuildArgs) -> Blocks:
    norms, padding = _norms(args, 1e-3, 0.99), MobileNetOptions.read(args.options).conv_padding
    stem = conv_norm((args.input_shape[0], 16), 3, norms, stride=2, activation=nn.Hardswish, padding=padding)
    blocks: Blocks = {"features/0": stem}
    inputs = 16
    for row in rows:
        blocks[f"features/{len(blocks)}"] = GatedResidual(inputs, row, norms, padding)
        inputs = row.outputs
    blocks[f"features/{len(blocks)}"] = conv_norm((inputs, 6 * inputs), 1, norms, activation=nn.Hardswish)
    top = MobileNetOptions.read(args.options).top_width or top
    blocks["avgpool"] = nn.AdaptiveAvgPool2d(1)
    blocks["flatten"] = nn.Flatten()
    blocks["classifier/0"] = nn.Linear(6 * inputs, top)
    blocks["classifier/1"] = nn.Hardswish()
    blocks["classifier/2"] = _dropout(args, "classifier/2")
    blocks["classifier/3"] = nn.Linear(top, args.classes)
    return blocks


ASSEMBLIES: dict[str, Callable[[BuildArgs], Blocks]] = {
    "v2": _assemble_v2,
    "v3-small": partial(_assemble_v3, SMALL, 1024),
    "v3-large": partial(_assemble_v3, LARGE, 1280),
}


def small_normal(values: Tensor, fans: Fans, generator: Generator) -> Tensor:
    """Fill with a normal distribution of standard deviation 0.01."""
    return values.normal_(0, 0.01, generator=generator)


def read_size(options: ModelConfig) -> str:
    """Return the size that the options select."""
    size = MobileNetOptions.read(options).model_size.lower()
    if size not in ASSEMBLIES:
        raise ConfigError(
            f"--model-size {options.model_size} with --model mobilenet: known sizes are {', '.join(ASSEMBLIES)}"
        )
    return size


INIT_RULE = PerLayerInit(conv=kaiming_normal_fan_out, linear=small_normal, bias=zeros)

MODELS = {
    "mobilenet": ModelSpec(
        lambda args: ASSEMBLIES[read_size(args.options)](args),
        INIT_RULE,
        f"MobileNet of --model-size: {MobileNetOptions.sizes}",
        input_shape=(3, 224, 224),
        classes=1000,
        resolve=lambda options: f"mobilenet-{read_size(options)}",
    ),
    **{
        f"mobilenet-{size}": ModelSpec(
            assemble,
            INIT_RULE,
            f"MobileNet {size}",
            input_shape=(3, 224, 224),
            classes=1000,
            fixed_options=("model_size",),
        )
        for size, assemble in ASSEMBLIES.items()
    },
}
