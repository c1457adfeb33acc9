"""Forward and backward passes of the micro batches of a step, with the whole model or with one stage of it.

Both do the same to each micro batch: pass its position in the global batch to random layers and arithmetic, run
forward, and run backward from its loss, divided by the true number of samples of the global batch. The accumulated
gradient is therefore the mean over the global batch, even if the last micro batch is short.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from convolve import rng
from convolve.data.loader.loader import MicroBatch, StepBatch
from convolve.distributed.gradient_sync import GradientSync, NoSync
from convolve.distributed.pipeline import Pipeline
from convolve.engine.loss import CrossEntropy
from convolve.engine.metrics import Metrics
from convolve.models.network import Network
from convolve.numerics.execution import Execution, PlainExecution


class ForwardBackwardFn(Protocol):
    """Runs forward and backward for a step batch and leaves the mean gradient, times `scale`, in the parameters."""

    def run(self, step_batch: StepBatch, step: int, scale: float) -> None:
        """Process all micro batches of one step."""


@dataclass(frozen=True)
class PassContext:
    """What surrounds every pass; `shift` makes replicas with identical seeding draw as if each were the first."""

    seed: int
    arithmetic: Execution = field(default_factory=PlainExecution)
    grad_sync: GradientSync = field(default_factory=NoSync)
    shift: int = 0

    @contextmanager
    def passing(self, batch: MicroBatch, step: int) -> Iterator[None]:
        """Passes of one micro batch happen inside this."""
        place = batch.first - self.shift
        with rng.at(self.seed, step, place), self.arithmetic.micro_batch(place):
            yield


@dataclass(frozen=True)
class ForwardBackward:
    """The whole model, one micro batch after the other."""

    model: Network
    loss: CrossEntropy
    tally: Metrics
    setting: PassContext

    def run(self, step_batch: StepBatch, step: int, scale: float) -> None:
        """Forward and backward for every micro batch."""
        setting = self.setting
        with setting.arithmetic.step_context(setting.seed, step):
            for batch in step_batch.micro_batches:
                if batch is step_batch.micro_batches[-1]:
                    setting.grad_sync.last_micro_batch()
                with setting.passing(batch, step):
                    logits = setting.arithmetic.forward(self.model, batch.images)
                    loss = self.loss(logits, batch.targets)
                    torch.autograd.backward(loss / (step_batch.used_samples / scale))
                self.tally.add(loss.detach(), logits.detach(), batch.labels)


@dataclass(frozen=True)
class PipelineForwardBackward:
    """One stage of the model; the pipeline says when which micro batch passes."""

    part: Network
    loss: CrossEntropy
    tally: Metrics
    setting: PassContext
    pipeline: Pipeline

    def run(self, step_batch: StepBatch, step: int, scale: float) -> None:
        """Forward and backward for every micro batch, in the order of the schedule."""
        setting, batches = self.setting, step_batch.micro_batches

        def forward(number: int, x: Tensor) -> Tensor:
            answer = setting.arithmetic.forward(self.part, x)
            if not self.pipeline.last:
                return answer
            loss = self.loss(answer, batches[number].targets)
            self.tally.add(loss.detach(), answer.detach(), batches[number].labels)
            return loss / (step_batch.used_samples / scale)

        @contextmanager
        def around(number: int, backward: bool) -> Iterator[None]:
            if backward and number == len(batches) - 1:
                setting.grad_sync.last_micro_batch()
            with setting.passing(batches[number], step):
                yield

        with setting.arithmetic.step_context(setting.seed, step):
            self.pipeline.train([batch.images for batch in batches], forward, around)
