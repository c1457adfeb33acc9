"""How the micro batches of a window become gradients: here on one device, with the whole model."""

from dataclasses import dataclass
from typing import Protocol

import torch

from convolve.data.loader import Window
from convolve.engine.loss import CrossEntropy
from convolve.engine.tally import Tally
from convolve.models.network import Network


class Executor(Protocol):
    """Runs forward and backward for a window and leaves the mean gradient in the parameters."""

    def run(self, window: Window, step: int) -> None:
        """Process all micro batches of one step."""


@dataclass(frozen=True)
class WholeExecutor:
    """The whole model, one micro batch after the other.

    Each loss is divided by the window's true number of samples before its backward pass, so the accumulated gradient
    is the mean over the window, also where the last micro batch is short.
    """

    model: Network
    loss: CrossEntropy
    tally: Tally
    seed: int

    def run(self, window: Window, step: int) -> None:
        """Forward and backward for every micro batch."""
        for batch in window.batches:
            self.model.chance.move(self.seed, step, batch.first)
            logits = self.model(batch.images)
            loss = self.loss(logits, batch.labels)
            torch.autograd.backward(loss / window.samples)
            self.tally.add(loss.detach(), logits.detach(), batch.labels)
