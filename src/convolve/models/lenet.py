"""LeNet-5 and three related models for digits.

All of them are two 5x5 convolutions, each with a 2x2 max-pool, and one to three dense layers. The activation follows
the pool rather than the convolution: an increasing function and a maximum commute, so values and gradients are
unchanged, and the activation handles a quarter of the elements. (For ReLU they are equal to the bit; two inputs whose
sigmoids round to one number are a tie for the pool in the other order only.)

`lenet5` is initialized like torch's layers: Kaiming-uniform with a = sqrt(5), weights and biases within 1/sqrt(fan-in).
`lenet-bn`, `cnn-wide` and `lenet-sigmoid` are the models of three published systems, with their initializations.
The padded ones pool as "same" does there: an odd last row or column is kept, so every image size works.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from torch import nn

from convolve.config.model_options import LeNetOptions
from convolve.errors import ConfigError
from convolve.layers.batch_norm import BatchNorm2d
from convolve.layers.dropout import KeyedDropout
from convolve.layers.init import PerLayerInit, fan_in_uniform, glorot_uniform, glorot_vector, kaiming_normal, zeros
from convolve.models.spec import BuildArgs, ModelSpec

Blocks = dict[str, nn.Module]
KERNEL = 5
# The activation follows the pool, so the three are one unit.
CONV_POOL_RELU = (("conv1", "pool1", "act1"), ("conv2", "pool2", "act2"))


@dataclass(frozen=True)
class LeNetLayout:
    """One model of the family."""

    channels: tuple[int, int]
    padding: tuple[int, int]
    hidden: tuple[int, ...]
    activation: Callable[[], nn.Module] = nn.ReLU
    norm: bool = False
    dropout_rate: float = 0.0
    whole_pools: bool = False

    def blocks(self, order: BuildArgs) -> Blocks:
        """Return the blocks."""
        size = self._flat_size(order)
        return {**self._convolutions(order.input_shape[0]), "flatten": nn.Flatten(), **self._head(size, order)}

    def _convolutions(self, inputs: int) -> Blocks:
        blocks: Blocks = {}
        for number, (channels, padding) in enumerate(zip(self.channels, self.padding, strict=True), start=1):
            blocks[f"conv{number}"] = nn.Conv2d(inputs, channels, KERNEL, padding=padding)
            blocks[f"pool{number}"] = nn.MaxPool2d(2, ceil_mode=self.whole_pools)
            blocks[f"act{number}"] = self.activation()
            if self.norm and number == 1:
                blocks["bn1"] = BatchNorm2d(channels, eps=1e-5, momentum=1 - 0.9)
            inputs = channels
        return blocks

    def _head(self, size: int, order: BuildArgs) -> Blocks:
        blocks: Blocks = {}
        for number, width in enumerate(self.hidden, start=1):
            blocks[f"fc{number}"] = nn.Linear(size, width)
            blocks[f"act{number + 2}"] = self.activation()
            size = width
        dropout_rate = LeNetOptions.read(order.options).dropout_rate
        rate = self.dropout_rate if dropout_rate is None else dropout_rate
        if rate > 0:
            blocks["dropout"] = KeyedDropout(rate, "dropout")
        blocks[f"fc{len(self.hidden) + 1}"] = nn.Linear(size, order.classes)
        return blocks

    def _flat_size(self, order: BuildArgs) -> int:
        _, height, width = order.input_shape
        sides = [self._side(height), self._side(width)]
        if min(sides) < 1:
            smallest = next(side for side in range(1, 64) if self._side(side) >= 1)
            raise ConfigError(
                f"model {order.name}: {height}x{width} images are too small; use at least {smallest}x{smallest}"
            )
        return self.channels[1] * prod(sides)

    def _side(self, side: int) -> int:
        for padding in self.padding:
            side = (side + 2 * padding - KERNEL + 1 + self.whole_pools) // 2
        return side


LENET5 = LeNetLayout(channels=(6, 16), padding=(2, 0), hidden=(120, 84))
LENET_BN = LeNetLayout(channels=(20, 50), padding=(0, 0), hidden=(), norm=True)
CNN_WIDE = LeNetLayout(channels=(32, 32), padding=(2, 2), hidden=(1024,), dropout_rate=0.4, whole_pools=True)
LENET_SIGMOID = LeNetLayout(channels=(6, 16), padding=(2, 2), hidden=(120, 84), activation=nn.Sigmoid, whole_pools=True)

MODELS = {
    "lenet5": ModelSpec(
        LENET5.blocks,
        PerLayerInit(conv=fan_in_uniform, linear=fan_in_uniform, bias=fan_in_uniform),
        "LeNet-5 with ReLU and max-pool",
        block_groups=CONV_POOL_RELU,
    ),
    "lenet-bn": ModelSpec(
        LENET_BN.blocks,
        PerLayerInit(conv=kaiming_normal, linear=glorot_uniform, bias=zeros),
        "20 and 50 channels with one batch norm, no hidden dense layer (Paddle)",
        block_groups=CONV_POOL_RELU,
    ),
    "cnn-wide": ModelSpec(
        CNN_WIDE.blocks,
        PerLayerInit(conv=glorot_uniform, linear=glorot_uniform, bias=zeros),
        "32 and 32 channels, 1024 hidden units with dropout (Ascend, TensorFlow 2)",
        block_groups=CONV_POOL_RELU,
    ),
    "lenet-sigmoid": ModelSpec(
        LENET_SIGMOID.blocks,
        PerLayerInit(conv=glorot_uniform, linear=glorot_uniform, bias=glorot_vector),
        "padded LeNet with sigmoids (Ascend, TensorFlow 1)",
    ),
}
