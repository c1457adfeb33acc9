"""Forward and backward passes of the micro batches of a step, through the whole model or one pipeline stage.

The arithmetic: the loss of a micro batch is a sum over its samples, divided by the number of samples of the global
batch. So the accumulated gradient is the mean over the global batch even if the last micro batch is short.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from convolve import rng
from convolve.data.loader.loader import MicroBatch, StepBatch
from convolve.distributed.batch_norm_span import BatchNormSpan, NoSpan
from convolve.distributed.gradient_sync import GradientSync, NoSync
from convolve.distributed.pipeline import Pipeline
from convolve.engine.metrics import LossFn, Metrics, NullMetrics
from convolve.models.network import Network
from convolve.numerics.execution import Execution, PlainExecution


class ForwardBackwardFn(Protocol):
    """Accumulates the mean gradient of a global batch, times `scale`, in the parameters."""

    def run(self, batch: StepBatch, step: int, scale: float) -> None:
        """Process all micro batches of one step."""


@dataclass(frozen=True)
class PassContext:
    """Context of every pass; `sample_offset` makes replicas with identical seeding draw as if each were the first.

    `span` is that of the batch norms.
    """

    seed: int
    execution: Execution = field(default_factory=PlainExecution)
    grad_sync: GradientSync = field(default_factory=NoSync)
    sample_offset: int = 0
    span: BatchNormSpan | NoSpan = field(default_factory=NoSpan)

    @contextmanager
    def micro_batch(self, batch: MicroBatch, count: int, step: int) -> Iterator[None]:
        """Run the passes of one of `count` micro batches inside this context."""
        first = batch.first - self.sample_offset
        self.span.select(batch.number, count)
        with rng.at(self.seed, step, first), self.execution.micro_batch(first):
            yield


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """Runs the whole model, one micro batch after the other."""

    model: Network
    loss: LossFn
    context: PassContext
    metrics: Metrics = field(default_factory=NullMetrics)

    def run(self, batch: StepBatch, step: int, scale: float) -> None:
        context = self.context
        with context.execution.step_context(context.seed, step):
            for micro_batch in batch.micro_batches:
                if micro_batch is batch.micro_batches[-1]:
                    context.grad_sync.last_micro_batch()
                with context.micro_batch(micro_batch, batch.count, step):
                    logits = context.execution.forward(self.model, micro_batch.images)
                    loss = self.loss(logits, micro_batch.targets)
                    torch.autograd.backward(loss / (batch.used_samples / scale))
                self.metrics.update(loss.detach(), logits.detach(), micro_batch.labels)


@dataclass(frozen=True, kw_only=True)
class PipelineForwardBackward:
    """Runs one stage of the model; the pipeline schedule orders the passes."""

    stage: Network
    pipeline: Pipeline
    loss: LossFn
    context: PassContext
    metrics: Metrics = field(default_factory=NullMetrics)

    def run(self, batch: StepBatch, step: int, scale: float) -> None:
        context, micro_batches = self.context, batch.micro_batches

        def forward(number: int, x: Tensor) -> Tensor:
            output = context.execution.forward(self.stage, x)
            if not self.pipeline.last:
                return output
            loss = self.loss(output, micro_batches[number].targets)
            self.metrics.update(loss.detach(), output.detach(), micro_batches[number].labels)
            return loss / (batch.used_samples / scale)

        @contextmanager
        def around(number: int, backward: bool) -> Iterator[None]:
            if backward and number == len(micro_batches) - 1:
                context.grad_sync.last_micro_batch()
            with context.micro_batch(micro_batches[number], batch.count, step):
                yield

        # Replicas that wait for each other inside a pass must order their passes alike.
        lockstep = context.span.size > 1 and not batch.even
        images = [micro_batch.images for micro_batch in micro_batches]
        with context.execution.step_context(context.seed, step):
            self.pipeline.train(images, forward, around, lockstep=lockstep)
