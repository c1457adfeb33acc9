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


class RMSpropTF(Rule):
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
