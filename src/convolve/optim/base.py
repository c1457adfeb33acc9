"""Base class of the optimizers that PyTorch does not have, or not in the form that is needed."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


class PerWeightOptimizer(torch.optim.Optimizer):
    """Visits every parameter that has a gradient. Subclasses update one of them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter once."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, weight.grad, cast(dict[str, Tensor], self.state[weight]), group)
        return None

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Update one weight in place."""
        raise NotImplementedError


def get_slot(state: dict[str, Tensor], name: str, weight: Tensor, initial: float = 0.0) -> Tensor:
    """Return the optimizer state of a weight under a name, created with its initial value if it does not exist."""
    if name not in state:
        state[name] = torch.full_like(weight, initial, memory_format=torch.preserve_format)
    return state[name]
