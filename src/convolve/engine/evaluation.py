"""Exact evaluation: every sample once, counted, and the model left as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from convolve.data.loader import Loader, Part
from convolve.engine.loss import CrossEntropy
from convolve.engine.tally import Counts, MetricTally
from convolve.models.network import Network
from convolve.parallel.team import Alone, Team

Answer = Callable[[Tensor], Tensor | None]
"""From images to logits; None at a stage of a pipeline whose successors give them."""


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode before comes back afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


def evaluate(
    model: Network, loader: Loader, batch_size: int, team: Team | None = None, answer: Answer | None = None
) -> Counts:
    """Loss (without label smoothing) and accuracy over all samples of a loader; replicas share the batches."""
    device = next(model.parameters()).device
    tally, loss = MetricTally(device, team), CrossEntropy()
    topology, answer = (team or Alone()).topology, answer or model
    with evaluating(model):
        for batch in loader.batches(batch_size, Part(topology.replica, topology.replicas)):
            logits = answer(batch.images)
            if logits is not None:
                tally.add(loss(logits, batch.labels), logits, batch.labels)
    counts = tally.read()
    assert counts.samples + len(loader.skipped) >= len(loader), f"counted {counts.samples} of {len(loader)} samples"
    return counts
