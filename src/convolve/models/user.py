"""A model that is given as an object: a module, or a class or function that makes one.

A module is trained in place, so closures over its parameters work, and it has the last weights at the end. A run also
builds its model for other purposes, such as validating stored checkpoints; these builds get copies.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy

from torch import nn

from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError, describe
from convolve.layers.generators import keyed_generators
from convolve.models.adopt import adopt_model, kept_as_found
from convolve.models.foreign import call_maker
from convolve.models.network import Network, Shape
from convolve.models.spec import BuildArgs

Maker = nn.Module | Callable[..., nn.Module]


class UserModel:
    """A module or its maker, as the module of a run; `name` is what the run records as its model."""

    input_shape: Shape | None = None

    def __init__(self, maker: Maker) -> None:
        code = type(maker) if isinstance(maker, nn.Module) else maker
        self.name = f"{code.__module__}:{getattr(code, '__qualname__', type(code).__qualname__)}"
        self._subject = f"model {getattr(code, '__qualname__', self.name)}"
        self._maker = maker
        self._unused = isinstance(maker, nn.Module)
        self._pristine: nn.Module | None = None

    def build(self, classes: int, input_shape: Shape, seed: int) -> Network:
        """Return the module for the first caller, a copy for later ones."""
        if not isinstance(self._maker, nn.Module):
            return self._adopt(self._make(classes, input_shape, seed), classes, input_shape)
        if not self._unused and self._pristine is not None:
            return self._adopt(deepcopy(self._pristine), classes, input_shape)
        self._unused = False
        try:
            self._pristine = deepcopy(self._maker)
        except Exception as error:
            raise ConfigError(f"{self._subject}: cannot be copied ({describe(error)}); make it copyable") from error
        return self._adopt(self._maker, classes, input_shape)

    def copy(self) -> "UserModel":
        """Return the same model with a copy of the module, to load weights into."""
        return UserModel(deepcopy(self._maker)) if isinstance(self._maker, nn.Module) else self

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Leave a module as it was before, except for its weights."""
        if not isinstance(self._maker, nn.Module):
            yield
            return
        with kept_as_found(self._maker):
            try:
                yield
            finally:
                self._unused = True

    def _make(self, classes: int, input_shape: Shape, seed: int) -> nn.Module:
        args = BuildArgs(self._subject.removeprefix("model "), classes, input_shape, ModelConfig())
        with keyed_generators(seed, "init", self.name):
            return call_maker(self._maker, args)

    def _adopt(self, module: nn.Module, classes: int, input_shape: Shape) -> Network:
        if isinstance(module, Network):
            return module
        return adopt_model(module, input_shape=input_shape, classes=classes, subject=self._subject)
