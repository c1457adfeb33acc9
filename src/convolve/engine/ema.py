"""Exponential moving average of the weights.

The arithmetic: after update number t, a := d a + (1 - d) w for every weight and norm statistic, with
d = min(decay, (1 + t) / (10 + t)), so the initial weights are forgotten quickly. A skipped step does not change it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from convolve.errors import CheckpointError


class WeightAverage(Protocol):
    """Average of the weights of a model during training."""

    def update(self, model: nn.Module, step: int) -> None:
        """Include the weights after an optimizer update."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the average by parameter name; empty if there is none."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a stored average."""


class NoEMA:
    """Null object of `WeightAverage`."""

    def update(self, model: nn.Module, step: int) -> None:
        pass

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        pass


class ModelEMA:
    """Exponential average of all floating-point weights and statistics, in float32 or wider."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._average = {name: tensor.detach().clone() for name, tensor in _float_tensors(model).items()}

    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self._average.values()), list(_float_tensors(model).values()), 1 - decay)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._average)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        names = sorted(set(tensors) ^ set(self._average))
        if names:
            raise CheckpointError(
                f"averages.safetensors: '{names[0]}' does not fit the model; use the config it was made with"
            )
        for name, tensor in tensors.items():
            self._average[name].copy_(tensor)


def _float_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


@contextmanager
def temporary_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace weights of the model inside the block, and restore them bit for bit."""
    current = model.state_dict()
    saved = {name: current[name].clone() for name in tensors}
    with torch.no_grad():
        try:
            for name, tensor in tensors.items():
                current[name].copy_(tensor)
            yield
        finally:
            for name, tensor in saved.items():
                current[name].copy_(tensor)
