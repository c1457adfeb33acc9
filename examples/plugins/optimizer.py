"""An optimizer by name: Lion (Chen et al. 2023). Checkpoints store its state, so a resumed run has the same bits.

convolve train --plugin examples/plugins/optimizer.py --optimizer lion --learning-rate 0.0003 --dataset digits
"""

import torch

import convolve


@convolve.optimizers.register("lion")
class Lion(torch.optim.Optimizer):
    def __init__(self, groups: list[dict], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                update = torch.lerp(weight.grad, momentum, 0.9).sign() + group["weight_decay"] * weight
                weight.sub_(update, alpha=group["lr"])
                momentum.lerp_(weight.grad, 0.01)
