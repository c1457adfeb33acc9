"""A few steps of an optimizer on one parameter, for comparison with its formula."""

import numpy as np
import torch
from torch import nn

from convolve.config import OptimConfig
from convolve.optim.optimizers import build_optimizer, set_learning_rate


def run_optimizer(shape, rates, seed, **options):
    """Return the weights after a step at each learning rate, the initial weights and the gradients."""
    draw = np.random.default_rng(seed)
    first, gradients = draw.normal(size=shape), [draw.normal(size=shape) for _ in rates]
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.from_numpy(first.copy()))
    optimizer = build_optimizer(holder, OptimConfig(**options))
    for rate, gradient in zip(rates, gradients, strict=True):
        set_learning_rate(optimizer, rate)
        holder.weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    return holder.weight.detach().numpy(), first, gradients
