"""Exact evaluation: every sample is counted once, and the model is left unchanged.

Batch norms are folded into convolutions in a temporary copy: the same function to the last few bits, with fewer passes
over memory. A model with hooks, or in an execution that rounds results (16-bit formats), is evaluated without folding.

Test-time augmentation averages logits over views. One view is the image. Two are the image and its mirror image. Six
add both of these shifted by one pixel, up and left or down and right, with reflected edges:

    half the mean over the two unshifted views, and half the mean over the four shifted ones
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from convolve.data.loader.loader import Loader, ReplicaShard
from convolve.distributed.collectives import Collectives, SingleProcess
from convolve.download import Progress
from convolve.engine.metrics import EvalResult, RunningMetrics
from convolve.engine.objective import Objective
from convolve.layers.fold import count_batch_norms, fold_batch_norms
from convolve.layers.hooks import has_hooks
from convolve.models.network import Network
from convolve.numerics.execution import Execution, PlainExecution

VALID_BATCH = 500
LogitsFn = Callable[[Tensor], Tensor | None]
"""Maps images to logits; returns None at a pipeline stage that is not the last."""


def average_views(logits_fn: LogitsFn, views: int) -> LogitsFn:
    """Return a function that averages logits over 1, 2 or 6 views."""
    choices: dict[int, LogitsFn] = {1: logits_fn, 2: _Flipped(logits_fn), 6: _Shifted(_Flipped(logits_fn))}
    return choices[views]


class _Flipped:
    def __init__(self, logits_fn: LogitsFn) -> None:
        self._logits = logits_fn

    def __call__(self, images: Tensor) -> Tensor | None:
        return _mean(self._logits(images), self._logits(images.flip(3)))


class _Shifted:
    def __init__(self, logits_fn: LogitsFn) -> None:
        self._logits = logits_fn

    def __call__(self, images: Tensor) -> Tensor | None:
        padded = functional.pad(images, (1, 1, 1, 1), "reflect")
        shifted = _mean(self._logits(padded[:, :, :-2, :-2]), self._logits(padded[:, :, 2:, 2:]))
        return _mean(self._logits(images), shifted)


def _mean(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else (first + second) / 2


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients inside the block; the previous mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


def fold_for_inference(model: Network) -> Network:
    """Return the model with batch norms folded, if possible. Valid only until the weights change."""
    hooked = any(map(has_hooks, model.modules()))
    return model if hooked or not count_batch_norms(model) else fold_batch_norms(model)


def _logits_fn(model: Network, execution: Execution) -> LogitsFn:
    return fold_for_inference(model) if execution.foldable else partial(execution.forward, model)


@dataclass(frozen=True)
class EvalSetup:
    """How to evaluate: views of each image, execution of the number format, loss and metrics.

    `thresholds` are those of several labels per image; None fits them to the images. `on_batch` receives the logits and
    labels of each batch.
    """

    views: int = 1
    execution: Execution = field(default_factory=PlainExecution)
    objective: Objective = field(default_factory=Objective)
    thresholds: Sequence[float] | None = None
    on_batch: Callable[[Tensor, Tensor], object] = lambda logits, labels: None


PLAIN_SETUP = EvalSetup()


def count_images(progress: Progress, task: str, total: int) -> Callable[[Tensor, Tensor], None]:
    """Return an `on_batch` that reports how many of `total` images were evaluated."""
    done = 0

    def on_batch(logits: Tensor, labels: Tensor) -> None:
        nonlocal done
        done += len(labels)
        progress(task, done, total)

    return on_batch


def evaluate(
    model: Network,
    loader: Loader,
    batch_size: int,
    collectives: Collectives | None = None,
    logits_fn: LogitsFn | None = None,
    setup: EvalSetup = PLAIN_SETUP,
) -> EvalResult:
    """Return loss (without label smoothing) and accuracy over all samples of a loader, split among replicas."""
    device, objective = next(model.parameters()).device, setup.objective
    collectives = collectives or SingleProcess()
    loss, topology = objective.valid_loss, collectives.topology
    shard = ReplicaShard(topology.replica, topology.replicas, needs_images=topology.stage == 0)
    metrics = RunningMetrics(device, collectives, objective.metrics, objective.correct)
    ranking = objective.open_ranking(setup.thresholds, collectives)
    with eval_mode(model):
        logits_fn = average_views(logits_fn or _logits_fn(model, setup.execution), setup.views)
        for batch in loader.batches(batch_size, shard):
            logits = logits_fn(batch.images)
            if logits is not None:
                metrics.update(loss(logits, batch.labels), logits, batch.labels)
                ranking.update(logits, batch.labels)
                setup.on_batch(logits, batch.labels)
    result = ranking.complete(metrics.compute())
    assert result.samples + len(loader.skipped) >= len(loader), f"counted {result.samples} of {len(loader)} samples"
    return result
