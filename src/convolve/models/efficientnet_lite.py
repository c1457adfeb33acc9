"""EfficientNet-Lite 0 to 4: EfficientNet without sigmoids, for small devices; names in torchvision's style.

The differences from EfficientNet, as published with TensorFlow's models: ReLU6 instead of swish, no squeeze and
excitation, 32 channels after the stem and 1280 in the head at every size, and first and last stage never repeated.
Padding is TensorFlow's "same", epsilon 1e-3 and the decay of batch norms 0.99.
"""

import math
from dataclasses import dataclass
from functools import partial

from torch import nn

from convolve.config.model_options import EfficientNetLiteOptions
from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError
from convolve.layers.blocks import conv_norm, round_width
from convolve.layers.dropout import KeyedDropout
from convolve.layers.norm import NormFactory
from convolve.models.efficientnet import GROUPS, INIT_RULE, STEM, BlockPosition, Blocks, BlockStyle, MBConv
from convolve.models.spec import BuildArgs, ModelSpec

HEAD = 1280


@dataclass(frozen=True)
class LiteSize:
    """Width and depth coefficients, dropout, and image side of a model size."""

    width: float
    depth: float
    dropout: float
    side: int


SIZES = {
    "0": LiteSize(1.0, 1.0, 0.2, 224),
    "1": LiteSize(1.0, 1.1, 0.2, 240),
    "2": LiteSize(1.1, 1.2, 0.3, 260),
    "3": LiteSize(1.2, 1.4, 0.3, 280),
    "4": LiteSize(1.4, 1.8, 0.3, 300),
}


def read_size(options: ModelConfig) -> str:
    """Return the size that the options select; `0` and `lite0` are the same."""
    size = EfficientNetLiteOptions.read(options).model_size.lower().removeprefix("lite")
    if size not in SIZES:
        raise ConfigError(
            f"--model-size {options.model_size} with --model efficientnet-lite: known sizes are {', '.join(SIZES)}"
        )
    return size


def _assemble(name: str, args: BuildArgs) -> Blocks:
    size, options = SIZES[name], EfficientNetLiteOptions.read(args.options)
    norms = NormFactory(options.norm_type, options.groups, options.norm_epsilon, options.bn_decay, clip=True)
    style = BlockStyle(norms, nn.ReLU6, expand_ratio=6, group_dim=1, se=False, padding=options.conv_padding)
    stem = conv_norm((args.input_shape[0], STEM), 3, norms, stride=2, activation=nn.ReLU6, padding=options.conv_padding)
    blocks: Blocks = {"features/0": stem}
    positions = _positions(size, options.block_survival_prob)
    blocks.update({position.name: MBConv(position, style) for position in positions})
    head = conv_norm((positions[-1].outputs, HEAD), 1, norms, activation=nn.ReLU6)
    blocks[f"features/{len(GROUPS) + 1}"] = head
    blocks["avgpool"] = nn.AdaptiveAvgPool2d(1)
    blocks["flatten"] = nn.Flatten()
    rate = size.dropout if options.dropout_rate is None else options.dropout_rate
    if rate > 0:
        blocks["classifier/0"] = KeyedDropout(rate, "classifier/0")
    blocks["classifier/1"] = nn.Linear(HEAD, args.classes)
    return blocks


def _positions(size: LiteSize, survival: float) -> list[BlockPosition]:
    outer = (GROUPS[0], GROUPS[-1])
    repeats = [group.repeats if group in outer else math.ceil(group.repeats * size.depth) for group in GROUPS]
    positions: list[BlockPosition] = []
    inputs = STEM
    for number, (group, count) in enumerate(zip(GROUPS, repeats, strict=True), start=1):
        outputs = round_width(group.width * size.width)
        for index in range(count):
            keep = 1 - (1 - survival) * len(positions) / sum(repeats)
            stride = group.stride if index == 0 else 1
            name = f"features/{number}/{index}"
            positions.append(BlockPosition(inputs, outputs, group.kernel, stride, group.expands, keep, name))
            inputs = outputs
    return positions


def _named(name: str, size: LiteSize) -> ModelSpec:
    return ModelSpec(
        partial(_assemble, name),
        INIT_RULE,
        f"EfficientNet-Lite{name}, made for {size.side} pixels",
        input_shape=(3, size.side, size.side),
        classes=1000,
        fixed_options=("model_size",),
    )


MODELS = {
    "efficientnet-lite": ModelSpec(
        lambda args: _assemble(read_size(args.options), args),
        INIT_RULE,
        f"EfficientNet-Lite of --model-size: {EfficientNetLiteOptions.sizes}",
        input_shape=(3, 224, 224),
        classes=1000,
        resolve=lambda options: f"efficientnet-lite{read_size(options)}",
    ),
    **{f"efficientnet-lite{name}": _named(name, size) for name, size in SIZES.items()},
}
