"""Update rules that torch does not have, or not in the form that is needed.

The arithmetic, for a weight w with gradient g, rate r, momentum m and decay d (g already holds d w where decay is L2):

    RMSpropTF   s := s + (1 - a) (g^2 - s), s begins at 1;  v := m v + r g / sqrt(s + e);  w := w - v
    Lars        t = k |w| / (|g| + d |w| + e), 1 where |w| or |g| is 0;  v := m v + r t (g + d w);  w := w - v
                (You et al. 2017; decay enters once, here. Weights that do not decay have t = 1.)
    Muon        v := m v + g;  u = orthogonal(g + m v) sqrt(max(1, rows / columns));  w := (1 - r d) w - r u
                or, with a fixed norm, w := sqrt(rows) w / |w| - r u
                (Jordan et al. 2024, for convolutions seen as [outputs, inputs x kernel]; all else is Nesterov momentum)

RMSpropTF is what TensorFlow computes: epsilon inside the root, and the rate inside the momentum, so that a falling rate
does not slow down what is already moving.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


class Rule(torch.optim.Optimizer):
    """Walks over the parameters that have gradients; subclasses say what happens to one of them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter once."""
        assert closure is None, "these rules take no closure"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, weight.grad, cast(dict[str, Tensor], self.state[weight]), group)
        return None

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Change one weight in place."""
        raise NotImplementedError


def _slot(state: dict[str, Tensor], name: str, weight: Tensor, first: float = 0.0) -> Tensor:
    if name not in state:
        state[name] = torch.full_like(weight, first, memory_format=torch.preserve_format)
    return state[name]


class Lars(Rule):
    """Layer-wise adaptive rates; the decay is part of the trust ratio and of the update, and of nothing else."""

    def __init__(self, groups: Any, *, lr: float, momentum: float, eeta: float, epsilon: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "eeta": eeta, "epsilon": epsilon})

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Change one weight in place; the trust stays on the device."""
        velocity = _slot(state, "momentum_buffer", weight).mul_(group["momentum"])
        if group["plain"]:
            velocity.add_(gradient, alpha=group["lr"])
        else:
            decay = group["weight_decay"]
            long, steep = weight.norm(), gradient.norm()
            trust = group["eeta"] * long / (steep + decay * long + group["epsilon"])
            trust = torch.where((long > 0) & (steep > 0), trust, torch.ones_like(trust))
            velocity.add_(gradient.add(weight, alpha=decay).mul_(trust * group["lr"]))
        weight.sub_(velocity)
