"""How the micro batches of a window become gradients: here on one device, with the whole model."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from convolve.data.loader import Window
from convolve.engine.loss import CrossEntropy
from convolve.engine.tally import Tally
from convolve.models.network import Network
from convolve.numerics.arithmetic import Arithmetic, PlainArithmetic
from convolve.parallel.team import NoSynchroniser, Synchroniser


class Executor(Protocol):
    """Runs forward and backward for a window and leaves the mean gradient, times `scale`, in the parameters."""

    def run(self, window: Window, step: int, scale: float) -> None:
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
    arithmetic: Arithmetic = field(default_factory=PlainArithmetic)
    synchronise: Synchroniser = field(default_factory=NoSynchroniser)

    def run(self, window: Window, step: int, scale: float) -> None:
        """Forward and backward for every micro batch."""
        with self.arithmetic.window(self.seed, step):
            for batch in window.batches:
                if batch is window.batches[-1]:
                    self.synchronise.arm()
                self.model.chance.move(self.seed, step, batch.first)
                with self.arithmetic.micro_batch(batch.first):
                    logits = self.model(batch.images)
                    loss = self.loss(logits, batch.targets)
                    torch.autograd.backward(loss / (window.counted / scale))
                self.tally.add(loss.detach(), logits.detach(), batch.labels)
