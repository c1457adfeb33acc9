"""Forward and backward passes of the micro batches of a step, through the whole model or one pipeline stage.

The arithmetic: the loss of a micro batch is a sum over its samples, divided by the number of samples of the global
batch. So the accumulated gradient is the mean over the global batch even if the last micro batch is short.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from convolve import rng, summation
from convolve.data.loader.loader import MicroBatch, StepBatch
from convolve.distributed.batch_norm_span import BatchNormSpan, NoSpan
from convolve.distributed.gradient_sync import GradientSync, NoSync
from convolve.distributed.pipeline import Pipeline
from convolve.engine.metrics import LossFn, Metrics, NullMetrics
from convolve.engine.pace import NoPace, Pace
from convolve.engine.verification import NoVerification, PassResults, Verification, without_side_effects
from convolve.models.network import Network
from convolve.numerics.execution import Execution, PlainExecution


class ForwardBackwardFn(Protocol):
    """Accumulates the mean gradient of a global batch, times `scale`, in the parameters."""

    def run(self, batch: StepBatch, step: int, scale: float) -> None:
        """Process all micro batches of one step."""


class TeacherFn(Protocol):
    """Adds the loss of distillation to the loss of the labels, both summed over a micro batch."""

    def __call__(self, loss: Tensor, logits: Tensor, images: Tensor) -> Tensor: ...


def no_teacher(loss: Tensor, logits: Tensor, images: Tensor) -> Tensor:
    """Return the loss of the labels."""
    return loss


@dataclass(frozen=True)
class PassContext:
    """Context of every pass; with `identical_seeding` every replica draws as if it were the first.

    `span` is that of the batch norms.
    """

    seed: int
    execution: Execution = field(default_factory=PlainExecution)
    grad_sync: GradientSync = field(default_factory=NoSync)
    identical_seeding: bool = False
    span: BatchNormSpan | NoSpan = field(default_factory=NoSpan)

    @contextmanager
    def micro_batch(self, batch: MicroBatch, step_batch: StepBatch, step: int) -> Iterator[None]:
        """Run the passes of a micro batch inside this context."""
        first = batch.first - (step_batch.micro_batches[0].first if self.identical_seeding else 0)
        self.span.select(batch.number, step_batch.count)
        leaf = summation.at(summation.Leaf(batch.leaf, step_batch.count))
        with leaf, rng.at(self.seed, step, first), self.execution.micro_batch(first):
            yield

    @contextmanager
    def repeated(self, batch: MicroBatch, step_batch: StepBatch, step: int) -> Iterator[None]:
        """Run the passes of a micro batch once more inside this context, under the keys of the first time."""
        first = batch.first - (step_batch.micro_batches[0].first if self.identical_seeding else 0)
        with self.execution.repetition(first), self.micro_batch(batch, step_batch, step):
            yield

    def start_backward(self, batch: MicroBatch, step_batch: StepBatch) -> None:
        """Prepare the sum of gradients for the backward pass of a micro batch."""
        if batch is step_batch.micro_batches[-1]:
            self.grad_sync.last_micro_batch(batch.leaf)

    def end_backward(self, batch: MicroBatch, step_batch: StepBatch) -> None:
        """Add the gradients of a micro batch to the sum; those of the last one are added when the step ends."""
        if batch is not step_batch.micro_batches[-1]:
            self.grad_sync.end_micro_batch(batch.leaf)


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """Runs the whole model, one micro batch after the other."""

    model: Network
    loss: LossFn
    context: PassContext
    metrics: Metrics = field(default_factory=NullMetrics)
    verification: Verification = field(default_factory=NoVerification)
    pace: Pace = field(default_factory=NoPace)
    teacher: TeacherFn = no_teacher

    def run(self, batch: StepBatch, step: int, scale: float) -> None:
        context = self.context
        self.pace.on_step_start()
        with context.execution.step_context(context.seed, step):
            context.grad_sync.start(batch.leaves, batch.count)
            for micro_batch in batch.micro_batches:
                context.start_backward(micro_batch, batch)
                with context.micro_batch(micro_batch, batch, step):
                    loss, logits = self._forward(micro_batch)
                    torch.autograd.backward(loss / (batch.used_samples / scale))
                self._verify(micro_batch, batch, step, scale, loss.detach())
                context.end_backward(micro_batch, batch)
                self.metrics.update(loss.detach(), logits.detach(), micro_batch.labels)
                self.pace.on_micro_batch(len(batch.micro_batches))

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        logits = self.context.execution.forward(self.model, batch.images)
        return self.teacher(self.loss(logits, batch.targets), logits, batch.images), logits

    def _verify(self, micro_batch: MicroBatch, batch: StepBatch, step: int, scale: float, loss: Tensor) -> None:
        def first() -> PassResults:
            return {"loss": loss, **{name: parameter.grad for name, parameter in self._trained()}}

        def again() -> PassResults:
            with without_side_effects(self.model), self.context.repeated(micro_batch, batch, step):
                second, _ = self._forward(micro_batch)
                names, parameters = zip(*self._trained(), strict=True)
                # Unlike a backward pass, this leaves the gradients of the parameters and their hooks alone.
                gradients = torch.autograd.grad(second / (batch.used_samples / scale), parameters, allow_unused=True)
            return {"loss": second, **dict(zip(names, gradients, strict=True))}

        self.verification.compare_pass(step, micro_batch.number, first, again)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad)


def with_pace(passes: ForwardBackwardFn, pace: Pace) -> ForwardBackwardFn:
    """Return the passes with their progress reported; a pipeline, whose micro batches overlap, reports none."""
    return replace(passes, pace=pace) if isinstance(passes, ForwardBackward) else passes


def with_teacher(passes: ForwardBackwardFn, teacher: TeacherFn) -> ForwardBackwardFn:
    """Return the passes of a whole model that learn from a teacher."""
    assert isinstance(passes, ForwardBackward), "a rule rejects stages"
    return replace(passes, teacher=teacher)


@dataclass(frozen=True, kw_only=True)
class PipelineForwardBackward:
    """Runs one stage of the model; the pipeline schedule orders the passes."""

    stage: Network
    pipeline: Pipeline
    loss: LossFn
    context: PassContext
    metrics: Metrics = field(default_factory=NullMetrics)
    verification: Verification = field(default_factory=NoVerification)

    def run(self, batch: StepBatch, step: int, scale: float) -> None:
        context, micro_batches = self.context, batch.micro_batches

        def forward(number: int, x: Tensor) -> Tensor:
            output = context.execution.forward(self.stage, x)
            self._verify(micro_batches[number], batch, step, x, output)
            if not self.pipeline.last:
                return output
            loss = self.loss(output, micro_batches[number].targets)
            self.metrics.update(loss.detach(), output.detach(), micro_batches[number].labels)
            return loss / (batch.used_samples / scale)

        @contextmanager
        def around(number: int, backward: bool) -> Iterator[None]:
            if backward:
                context.start_backward(micro_batches[number], batch)
            with context.micro_batch(micro_batches[number], batch, step):
                yield
            if backward:
                context.end_backward(micro_batches[number], batch)

        # Replicas that wait for each other inside a pass must order their passes alike.
        lockstep = context.span.size > 1 and not batch.even
        images = [micro_batch.images for micro_batch in micro_batches]
        context.grad_sync.start(batch.leaves, batch.count)
        with context.execution.step_context(context.seed, step):
            self.pipeline.train(images, forward, around, lockstep=lockstep)

    def _verify(self, micro_batch: MicroBatch, batch: StepBatch, step: int, x: Tensor, output: Tensor) -> None:
        """Compare the output of this stage; gradients arrive through the schedule and are not computed again."""
        name = f"output of stage {self.pipeline.stage}"

        def again() -> PassResults:
            with without_side_effects(self.stage), self.context.repeated(micro_batch, batch, step):
                return {name: self.context.execution.forward(self.stage, x).detach()}

        self.verification.compare_pass(step, micro_batch.number, lambda: {name: output.detach()}, again)
