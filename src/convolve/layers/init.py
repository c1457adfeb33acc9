"""Initial weights as a pure function of (seed, parameter name).

Each parameter is drawn from a generator keyed by its name, so a process with some of the blocks initializes them with
the same bits as one with all of them, in any order.

The arithmetic: n is the fan-in (inputs times kernel area, per group) and m the fan-out of the layer's weight.

    fan_in_uniform    U(-1/sqrt(n), 1/sqrt(n))               Kaiming-uniform with a = sqrt(5), as in torch's layers
    kaiming_normal    N(0, 2/n)                              He et al. 2015, eq. 10
    kaiming_normal_fan_out    N(0, 2/m)                      the same for gradients, eq. 14
    glorot_uniform    U(-l, l), l = sqrt(6 / (n + m))        Glorot and Bengio 2010, eq. 16
    unit_uniform      U(-sqrt(3), sqrt(3))                   of standard deviation 1
    glorot_vector     U(-l, l), l = sqrt(6 / 2k)             the same for a bias of length k, as in TensorFlow 1
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from convolve.errors import ConfigError
from convolve.rng import hash_key


class Fans(NamedTuple):
    """Fan-in and fan-out of a layer."""

    fan_in: int
    fan_out: int


InitFn = Callable[[Tensor, Fans, Generator], object]


class InitRule(Protocol):
    """Initializes a parameter; `name` is its full name and `owner` its layer."""

    def __call__(self, name: str, owner: nn.Module, values: Tensor, generator: Generator) -> None:
        """Initialize in place."""


@runtime_checkable
class SelfInit(Protocol):
    """A layer that initializes its parameters."""

    def init_parameter(self, kind: str, values: Tensor) -> None:
        """Initialize the parameter named `kind` in place."""


def fan_in_uniform(values: Tensor, fans: Fans, generator: Generator) -> Tensor:
    """Uniform within 1/sqrt(fan-in)."""
    limit = 1 / sqrt(fans.fan_in)
    return values.uniform_(-limit, limit, generator=generator)


def kaiming_normal(values: Tensor, fans: Fans, generator: Generator) -> Tensor:
    """Normal with the standard deviation that preserves the scale of activations through ReLU layers."""
    return values.normal_(0, sqrt(2 / fans.fan_in), generator=generator)


def kaiming_normal_fan_out(values: Tensor, fans: Fans, generator: Generator) -> Tensor:
    """Normal with the standard deviation that preserves the scale of gradients through ReLU layers."""
    return values.normal_(0, sqrt(2 / fans.fan_out), generator=generator)


def glorot_uniform(values: Tensor, fans: Fans, generator: Generator) -> Tensor:
    """Uniform, with a width between those that preserve activations and gradients."""
    limit = sqrt(6 / (fans.fan_in + fans.fan_out))
    return values.uniform_(-limit, limit, generator=generator)


def unit_uniform(values: Tensor, fans: Fans, generator: Generator) -> Tensor:
    """Uniform with standard deviation 1."""
    return values.uniform_(-sqrt(3), sqrt(3), generator=generator)


def glorot_vector(values: Tensor, fans: Fans, generator: Generator) -> Tensor:
    """Glorot-uniform for a bias, with its length as both fans."""
    return glorot_uniform(values, Fans(values.numel(), values.numel()), generator)


def zeros(values: Tensor, fans: Fans, generator: Generator) -> Tensor:
    """All zero."""
    return values.zero_()


@dataclass(frozen=True)
class PerLayerInit:
    """One function for each kind of layer; norms start as the identity.

    A norm with an `initial_gamma` starts with that gamma, and a `SelfInit` layer initializes itself.
    """

    conv: InitFn
    linear: InitFn
    bias: InitFn

    def __call__(self, name: str, owner: nn.Module, values: Tensor, generator: Generator) -> None:
        """Initialize a parameter of a convolution, a dense layer or a norm."""
        kind = name.rpartition(".")[2]
        if isinstance(owner, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm):
            values.fill_(getattr(owner, "initial_gamma", 1.0) if kind == "weight" else 0.0)
        elif isinstance(owner, SelfInit):
            owner.init_parameter(kind, values)
        elif isinstance(owner, nn.Conv2d | nn.Linear):
            weight = self.conv if isinstance(owner, nn.Conv2d) else self.linear
            (weight if kind == "weight" else self.bias)(values, measure_fans(owner), generator)
        else:
            raise ConfigError(f"parameter {name}: unknown initialization of {type(owner).__name__}; write an InitRule")


def measure_fans(layer: nn.Conv2d | nn.Linear) -> Fans:
    """Return fan-in and fan-out of a layer's weight, per group."""
    outputs, inputs, *kernel = layer.weight.shape
    groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
    return Fans(inputs * prod(kernel), outputs // groups * prod(kernel))


@torch.no_grad()
def initialize(model: nn.Module, seed: int, rule: InitRule) -> None:
    """Initialize every parameter and buffer of a model."""
    for path, owner in model.named_modules():
        for kind, values in owner.named_parameters(path, recurse=False):
            rule(kind, owner, values, torch.Generator().manual_seed(hash_key(seed, "init", kind)))
        if any(True for _ in owner.buffers(recurse=False)):
            _reset_buffers(path, owner)


def _reset_buffers(path: str, owner: nn.Module) -> None:
    reset = getattr(owner, "reset_running_stats", None)
    if reset is None:
        raise ConfigError(
            f"block {path}: {type(owner).__name__} has buffers and no reset_running_stats() to initialize them; add it"
        )
    reset()
