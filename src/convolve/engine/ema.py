"""A running average of the weights, kept beside them while they are trained.

The arithmetic: after update number t, a := d a + (1 - d) w for every weight and norm statistic, with
d = min(decay, (1 + t) / (10 + t)), so that the untrained beginning is forgotten at once. A skipped step leaves the
average alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from convolve.errors import CheckpointError


class WeightAverage(Protocol):
    """Follows the weights of a model."""

    def follow(self, model: nn.Module, step: int) -> None:
        """Take in the weights after an update that was made."""

    def tensors(self) -> dict[str, Tensor]:
        """The average by parameter name; empty where none is kept."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become an average that was stored."""


class NoEMA:
    """Keeps nothing."""

    def follow(self, model: nn.Module, step: int) -> None:
        """Let the update pass."""

    def tensors(self) -> dict[str, Tensor]:
        """Nothing is kept."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing to become."""


class ModelEMA:
    """An exponential average of all floating-point weights and statistics, in float32 or wider."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._average = {name: tensor.detach().clone() for name, tensor in _float_tensors(model).items()}

    def follow(self, model: nn.Module, step: int) -> None:
        """Take in the weights after an update that was made."""
        decay = min(self.decay, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self._average.values()), list(_float_tensors(model).values()), 1 - decay)

    def tensors(self) -> dict[str, Tensor]:
        """The average by parameter name."""
        return dict(self._average)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become an average that was stored."""
        odd = sorted(set(tensors) ^ set(self._average))
        if odd:
            raise CheckpointError(
                f"averages.safetensors: '{odd[0]}' does not fit the model; use the config it was made with"
            )
        for name, tensor in tensors.items():
            self._average[name].copy_(tensor)


def _float_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


@contextmanager
def temporary_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other weights; its own come back afterwards, bit for bit."""
    own = model.state_dict()
    kept = {name: own[name].clone() for name in tensors}
    with torch.no_grad():
        try:
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
            yield
        finally:
            for name, tensor in kept.items():
                own[name].copy_(tensor)
