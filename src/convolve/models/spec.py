"""What a name in the registry stands for.

An architecture is made on torch's meta device first, where it costs no memory and draws no random numbers, and is
filled afterwards; a stage of a pipeline can therefore take its own blocks and never hold the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from convolve.config.schema import ModelConfig
from convolve.layers.init import InitRule, initialize
from convolve.models.network import Network, Shape


@dataclass(frozen=True)
class BuildArgs:
    """Arguments of the function that makes the blocks of a model."""

    name: str
    classes: int
    input_shape: Shape
    options: ModelConfig


@dataclass(frozen=True)
class ModelSpec:
    """How the blocks of a network are made, and how they are filled.

    `input_shape` and `classes` hold where no data set says otherwise; `settled` are the options that its name has
    decided already; `resolve` checks a family's size, and tells its network where the options alone decide that. A
    package that offers an architecture under the entry-point group `convolve.models` has it in every command.
    """

    blocks: Callable[[BuildArgs], Mapping[str, nn.Module]]
    rule: InitRule
    summary: str
    input_shape: Shape = (1, 28, 28)
    classes: int = 10
    settled: tuple[str, ...] = ()
    resolve: Callable[[ModelConfig], str | None] | None = None

    def sketch(self, order: BuildArgs) -> Network:
        """The network on the meta device: all names and shapes, no values."""
        with torch.device("meta"):
            return Network(self.blocks(order), input_shape=order.input_shape)

    def fill(self, network: Network, seed: int) -> Network:
        """Give a sketch, or a network of some of its blocks, memory on the CPU and its initial values."""
        network.to_empty(device="cpu")
        initialize(network, seed, self.rule)
        return network
