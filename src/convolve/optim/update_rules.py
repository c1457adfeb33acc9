"""Optimizers that PyTorch does not have, or not in the form that is needed.

For a weight w with gradient g, learning rate r, momentum m and weight decay d:

LARS, layer-wise adaptive learning rates (You et al. 2017), with trust coefficient k (`eeta`) and epsilon e:

    t = k |w| / (|g| + d |w| + e),  1 if |w| or |g| is 0;   v := m v + r t (g + d w);   w := w - v

Decay enters once, here. Weights of a `plain` group, those that do not decay, get momentum: v := m v + r g.

RMSprop as TensorFlow computes it, with g including d w, decay a and epsilon e:

    s := s + (1 - a) (g^2 - s), s starts at 1;   v := m v + r g / sqrt(s + e);   w := w - v

Epsilon is inside the root, and the learning rate is inside the momentum, so a falling learning rate does not slow down
the velocity that has built up.

Muon: orthogonalized momentum for convolutions (Jordan et al. 2024), Nesterov momentum for all other weights:

    orthogonal   v := m v + g;           u = orthogonal(g + m v) sqrt(max(1, rows / columns));   w := (1 - r d) w - r u
                 or, with a fixed norm,                                                  w := sqrt(rows) w / |w| - r u
    others       v := m v + (g + d w);                                           w := w - r (g + d w + m v)

A convolution is the matrix [outputs, inputs x kernel]. `orthogonal` sets its singular values to about 1 by `rounds`
Newton-Schulz iterations.
"""

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


class Lars(PerWeightOptimizer):
    """Layer-wise adaptive rate scaling."""

    def __init__(self, groups: Any, *, lr: float, momentum: float, eeta: float, epsilon: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "eeta": eeta, "epsilon": epsilon})

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Update one weight in place. The trust ratio stays on the device."""
        velocity = get_slot(state, "momentum_buffer", weight).mul_(group["momentum"])
        if group["plain"]:
            velocity.add_(gradient, alpha=group["lr"])
        else:
            decay = group["weight_decay"]
            weight_norm, gradient_norm = weight.norm(), gradient.norm()
            trust = group["eeta"] * weight_norm / (gradient_norm + decay * weight_norm + group["epsilon"])
            trust = torch.where((weight_norm > 0) & (gradient_norm > 0), trust, torch.ones_like(trust))
            velocity.add_(gradient.add(weight, alpha=decay).mul_(trust * group["lr"]))
        weight.sub_(velocity)


class RMSpropTF(PerWeightOptimizer):
    """RMSprop with the formulas of TensorFlow."""

    def __init__(self, groups: Any, *, lr: float, decay: float, momentum: float, epsilon: float) -> None:
        super().__init__(groups, {"lr": lr, "decay": decay, "momentum": momentum, "epsilon": epsilon})

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        gradient = gradient.add(weight, alpha=group["weight_decay"]) if group["weight_decay"] else gradient
        mean_square = get_slot(state, "square_avg", weight, 1.0)
        velocity = get_slot(state, "momentum_buffer", weight)
        mean_square.lerp_(gradient * gradient, 1 - group["decay"])
        velocity.mul_(group["momentum"]).addcdiv_(gradient, (mean_square + group["epsilon"]).sqrt_(), value=group["lr"])
        weight.sub_(velocity)


# Coefficients of Jordan et al.: singular values are between 0.7 and 1.2 after five iterations.
_A, _B, _C = 3.4445, -4.7750, 2.0315


class Muon(PerWeightOptimizer):
    """Momentum, orthogonalized in the groups marked `orthogonal`."""

    def __init__(self, groups: Any, *, lr: float, momentum: float, rounds: int, fixed_norm: bool) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "rounds": rounds, "fixed_norm": fixed_norm})

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        if not group["orthogonal"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        velocity = get_slot(state, "momentum_buffer", weight).mul_(group["momentum"]).add_(gradient)
        direction = gradient.add(velocity, alpha=group["momentum"])
        if group["orthogonal"]:
            shrink = 1 - group["lr"] * group["weight_decay"]
            weight.mul_(len(weight) ** 0.5 / weight.norm() if group["fixed_norm"] else shrink)
            matrix = direction.reshape(len(direction), -1)
            ratio = max(1, matrix.shape[0] / matrix.shape[1])
            direction = orthogonalize(matrix, group["rounds"]).mul_(ratio**0.5).view(direction.shape)
        weight.add_(direction, alpha=-group["lr"])


def orthogonalize(matrix: Tensor, rounds: int) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        square = x @ x.T
        x = _A * x + (_B * square + _C * square @ square) @ x
    result: Tensor = x.T.contiguous() if tall else x
    return result
