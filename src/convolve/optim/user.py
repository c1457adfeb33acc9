"""Optimizers of the user's code: a function of parameter groups that returns a `torch.optim.Optimizer`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from convolve import plugins
from convolve.errors import ConfigError, describe

OptimizerFn = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class UserOptimizer:
    """A function or class that makes an optimizer, and the name that the run records."""

    name: str
    make: OptimizerFn

    def build(self, groups: list[dict[str, Any]], learning_rate: float) -> torch.optim.Optimizer:
        """Return the optimizer of parameter groups. It must update all of them."""
        given = {id(parameter) for group in groups for parameter in group["params"]}
        options = {"lr": learning_rate} if "lr" in _arguments(self.make) else {}
        try:
            optimizer = self.make(groups, **options)
        except Exception as error:
            raise ConfigError(
                f"optimizer {self.name}: cannot be made of parameter groups ({describe(error)}); "
                "write a function of groups that returns a torch.optim.Optimizer"
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise ConfigError(f"optimizer {self.name}: returned {kind}; return a torch.optim.Optimizer")
        taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if taken != given:
            raise ConfigError(
                f"optimizer {self.name}: updates {len(taken & given)} of {len(given)} parameters; pass all groups on"
            )
        return optimizer


def _arguments(make: OptimizerFn) -> set[str]:
    try:
        return set(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        return set()


def read_optimizer(given: Any) -> UserOptimizer:
    """Return the optimizer of a class or function, or of a name that the user typed."""
    if isinstance(given, str):
        if ":" in given:
            plugins.trust(given)
        return UserOptimizer(given, _require_callable(given, plugins.OPTIMIZERS.resolve(given)))
    if isinstance(given, torch.optim.Optimizer):
        kind = type(given).__name__
        raise ConfigError(
            f"optimizer {kind}: an object holds its parameters; pass the class, or functools.partial({kind}, ...)"
        )
    function = _require_callable(repr(given)[:60], given)
    return UserOptimizer(plugins.name_of(function), function)


def find_optimizer(name: str, builtin: object | None) -> UserOptimizer | None:
    """Return the optimizer of a plugin, or of a trusted `package:attribute`; None for a built-in one."""
    if ":" in name:
        return UserOptimizer(name, _require_callable(name, plugins.OPTIMIZERS.resolve(name)))
    found = plugins.OPTIMIZERS.find(name, builtin)
    if found is None:
        found = plugins.OPTIMIZERS.resolve(name)
    return None if builtin is not None else UserOptimizer(name, _require_callable(name, found))


def _require_callable(name: str, found: Any) -> OptimizerFn:
    if not callable(found):
        raise ConfigError(
            f"optimizer {name}: is {type(found).__name__}; give a torch.optim class or a function of parameter groups"
        )
    make: OptimizerFn = found
    return make
