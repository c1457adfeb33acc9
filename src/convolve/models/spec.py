"""The specification of a model in the registry.

A model is built on torch's meta device first, without memory and random numbers, and materialized afterwards. With more
than one pipeline stage, every process still builds the whole model and then keeps its blocks.
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
    """How to build and initialize a model.

    `input_shape` and `classes` are defaults for use without a data set. `fixed_options` are the options that the name
    determines. `block_groups` are runs of consecutive blocks that form one unit: no pipeline stage starts inside one.
    `resolve` checks the size of a family, and returns the name of the model if the options alone determine it. A
    package that provides a spec in the entry-point group `convolve.models` adds its model to every command.
    """

    blocks: Callable[[BuildArgs], Mapping[str, nn.Module]]
    init: InitRule
    summary: str
    input_shape: Shape = (1, 28, 28)
    classes: int = 10
    fixed_options: tuple[str, ...] = ()
    block_groups: tuple[tuple[str, ...], ...] = ()
    resolve: Callable[[ModelConfig], str | None] | None = None

    def build_meta(self, args: BuildArgs) -> Network:
        """Build the model on the meta device: all names and shapes, no values."""
        with torch.device("meta"):
            return Network(self.blocks(args), input_shape=args.input_shape, block_groups=self.block_groups)

    def build(self, args: BuildArgs, seed: int) -> Network:
        """Build the initialized model on the CPU."""
        return self.materialize(self.build_meta(args), seed)

    def materialize(self, model: Network, seed: int) -> Network:
        """Allocate a model on the CPU, whole or some of its blocks, and initialize it."""
        # What `to_empty` does, without its detour over the meta device, which imports sympy.
        model._apply(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype))  # type: ignore[no-untyped-call]
        initialize(model, seed, self.init)
        return model
