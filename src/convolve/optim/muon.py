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

from typing import Any

from torch import Tensor

from convolve.optim.lars import Rule, _slot

# Newton-Schulz coefficients of Jordan et al.: singular values end between 0.7 and 1.2 after five rounds.
_A, _B, _C = 3.4445, -4.7750, 2.0315


class Muon(Rule):
    """Orthogonalized momentum for convolutions, Nesterov momentum for all else."""

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
            ahead = orthogonalize(flat, group["rounds"]).mul_(longer**0.5).view(ahead.shape)
        weight.add_(ahead, alpha=-group["lr"])


def orthogonalize(matrix: Tensor, rounds: int) -> Tensor:
    """A matrix with the singular vectors of the given one and singular values near 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        square = x @ x.T
        x = _A * x + (_B * square + _C * square @ square) @ x
    result: Tensor = x.T.contiguous() if tall else x
    return result
