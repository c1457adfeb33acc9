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

# Newton-Schulz coefficients of Jordan et al.: singular values end between 0.7 and 1.2 after five rounds.
_A, _B, _C = 3.4445, -4.7750, 2.0315


class _Rule(torch.optim.Optimizer):
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


class RMSpropTF(_Rule):
    """RMSprop as TensorFlow computes it."""

    def __init__(self, groups: Any, *, lr: float, decay: float, momentum: float, epsilon: float) -> None:
        super().__init__(groups, {"lr": lr, "decay": decay, "momentum": momentum, "epsilon": epsilon})

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Change one weight in place."""
        gradient = gradient.add(weight, alpha=group["weight_decay"]) if group["weight_decay"] else gradient
        square = _slot(state, "square_avg", weight, 1.0)
        velocity = _slot(state, "momentum_buffer", weight)
        square.lerp_(gradient * gradient, 1 - group["decay"])
        velocity.mul_(group["momentum"]).addcdiv_(gradient, (square + group["epsilon"]).sqrt_(), value=group["lr"])
        weight.sub_(velocity)


class Lars(_Rule):
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


class Muon(_Rule):
    """Orthogonalised momentum for convolutions, Nesterov momentum for all else."""

    def __init__(self, groups: Any, *, lr: float, momentum: float, rounds: int, fixed_norm: bool) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "rounds": rounds, "fixed_norm": fixed_norm})

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Change one weight in place."""
        if not group["orthogonal"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        velocity = _slot(state, "momentum_buffer", weight).mul_(group["momentum"]).add_(gradient)
        ahead = gradient.add(velocity, alpha=group["momentum"])
        if group["orthogonal"]:
            kept = 1 - group["lr"] * group["weight_decay"]
            weight.mul_(len(weight) ** 0.5 / weight.norm() if group["fixed_norm"] else kept)
            flat = ahead.reshape(len(ahead), -1)
            longer = max(1, flat.shape[0] / flat.shape[1])
            ahead = orthogonalise(flat, group["rounds"]).mul_(longer**0.5).view(ahead.shape)
        weight.add_(ahead, alpha=-group["lr"])


def orthogonalise(matrix: Tensor, rounds: int) -> Tensor:
    """A matrix with the singular vectors of the given one and singular values near 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        square = x @ x.T
        x = _A * x + (_B * square + _C * square @ square) @ x
    result: Tensor = x.T.contiguous() if tall else x
    return result
