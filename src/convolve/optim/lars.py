"""LARS: layer-wise adaptive learning rates (You et al. 2017).

For a weight w with gradient g, learning rate r, momentum m, weight decay d, trust coefficient k (`eeta`) and epsilon e:

    t = k |w| / (|g| + d |w| + e),  1 if |w| or |g| is 0;   v := m v + r t (g + d w);   w := w - v

Decay enters once, here. Weights of a `plain` group, those that do not decay, get momentum: v := m v + r g.
"""

from typing import Any

import torch
from torch import Tensor

from convolve.optim.base import PerWeightOptimizer, get_slot


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
