"""Exact evaluation: every sample once, counted, and the model left as it was.

Batch norms are folded into convolutions for it, in a copy that lasts as long as the evaluation: the same function to
the last few bits, in fewer passes over memory. A model whose layers are watched, as emulated arithmetic does, is
evaluated as it is.

Several views of each test image, whose answers are averaged.

One view is the image. Two are the image and its mirror image, with the mean of their logits. Six add both of these
moved by one pixel, up and left or down and right, with reflected edges:

    half the mean over the two views in place, and half the mean over the four that are moved

The pieces that several verbs need: the data, the network, and a trained network from a checkpoint.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from convolve.data.loader.loader import Loader, ReplicaShard
from convolve.distributed.collectives import Collectives, SingleProcess
from convolve.engine.loss import CrossEntropy
from convolve.engine.metrics import EvalResult, RunningMetrics
from convolve.layers.fold import count_batch_norms, fold_batch_norms
from convolve.layers.hooks import has_hooks
from convolve.models.network import Network
from convolve.numerics.execution import Execution, PlainExecution

VALID_BATCH = 500
LogitsFn = Callable[[Tensor], Tensor | None]
"""From images to logits; None at a stage of a pipeline whose successors give them."""


def average_views(answer: LogitsFn, views: int) -> LogitsFn:
    """An answer that looks at this many views: 1, 2 or 6."""
    choice: dict[int, LogitsFn] = {1: answer, 2: _Flipped(answer), 6: _Shifted(_Flipped(answer))}
    return choice[views]


class _Flipped:
    def __init__(self, answer: LogitsFn) -> None:
        self._answer = answer

    def __call__(self, images: Tensor) -> Tensor | None:
        return _mean(self._answer(images), self._answer(images.flip(3)))


class _Shifted:
    def __init__(self, answer: LogitsFn) -> None:
        self._answer = answer

    def __call__(self, images: Tensor) -> Tensor | None:
        wide = functional.pad(images, (1, 1, 1, 1), "reflect")
        moved = _mean(self._answer(wide[:, :, :-2, :-2]), self._answer(wide[:, :, 2:, 2:]))
        return _mean(self._answer(images), moved)


def _mean(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else (one + other) / 2


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode before comes back afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


def fold_for_inference(model: Network) -> Network:
    """A network that answers alike in less time, if there is one; it must not outlive the weights it was made from."""
    watched = any(map(has_hooks, model.modules()))
    return model if watched or not count_batch_norms(model) else fold_batch_norms(model)


def _logits_fn(model: Network, execution: Execution) -> LogitsFn:
    return fold_for_inference(model) if execution.foldable else partial(execution.forward, model)


def evaluate(
    model: Network,
    loader: Loader,
    batch_size: int,
    team: Collectives | None = None,
    answer: LogitsFn | None = None,
    views: int = 1,
    execution: Execution | None = None,
) -> EvalResult:
    """Loss (without label smoothing) and accuracy over all samples of a loader; replicas share the batches."""
    device = next(model.parameters()).device
    tally, loss = RunningMetrics(device, team), CrossEntropy()
    topology = (team or SingleProcess()).topology
    with eval_mode(model):
        answer = average_views(answer or _logits_fn(model, execution or PlainExecution()), views)
        for batch in loader.batches(batch_size, ReplicaShard(topology.replica, topology.replicas)):
            logits = answer(batch.images)
            if logits is not None:
                tally.add(loss(logits, batch.labels), logits, batch.labels)
    counts = tally.read()
    assert counts.samples + len(loader.skipped) >= len(loader), f"counted {counts.samples} of {len(loader)} samples"
    return counts
