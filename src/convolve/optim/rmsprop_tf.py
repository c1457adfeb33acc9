"""RMSprop as TensorFlow computes it.

For a weight w with gradient g (plus d w for weight decay d), learning rate r, momentum m, decay a and epsilon e:

    s := s + (1 - a) (g^2 - s), s starts at 1;   v := m v + r g / sqrt(s + e);   w := w - v

Epsilon is inside the root, and the learning rate is inside the momentum, so a falling learning rate does not slow down
the velocity that has built up.
"""

from typing import Any

from torch import Tensor

from convolve.optim.base import PerWeightOptimizer, get_slot


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
