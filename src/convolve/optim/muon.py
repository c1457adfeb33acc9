"""Muon: orthogonalized momentum for convolutions (Jordan et al. 2024), Nesterov momentum for all other weights.

For a weight w with gradient g, learning rate r, momentum m and weight decay d:

    orthogonal   v := m v + g;           u = orthogonal(g + m v) sqrt(max(1, rows / columns));   w := (1 - r d) w - r u
                 or, with a fixed norm,                                                  w := sqrt(rows) w / |w| - r u
    others       v := m v + (g + d w);                                           w := w - r (g + d w + m v)

A convolution is the matrix [outputs, inputs x kernel]. `orthogonal` sets its singular values to about 1 by `rounds`
Newton-Schulz iterations.
"""

from typing import Any

from torch import Tensor

from convolve.optim.base import PerWeightOptimizer, get_slot

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
