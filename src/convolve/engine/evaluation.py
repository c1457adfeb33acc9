"""Exact evaluation: every sample once, counted, and the model left as it was.

Batch norms are folded into convolutions for it, in a copy that lasts as long as the evaluation: the same function to
the last few bits, in fewer passes over memory. A model whose layers are watched, as emulated arithmetic does, is
evaluated as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from convolve.data.loader import Loader, Part
from convolve.engine.loss import CrossEntropy
from convolve.engine.tally import Counts, MetricTally
from convolve.engine.views import Answer, answer_views
from convolve.models.folding import count_batch_norms, fold_batch_norms
from convolve.models.network import Network
from convolve.models.watching import is_watched
from convolve.parallel.team import Alone, Team


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


def quicken(model: Network) -> Network:
    """A network that answers alike in less time, if there is one; it must not outlive the weights it was made from."""
    watched = any(map(is_watched, model.modules()))
    return model if watched or not count_batch_norms(model) else fold_batch_norms(model)


def evaluate(
    model: Network,
    loader: Loader,
    batch_size: int,
    team: Team | None = None,
    answer: Answer | None = None,
    views: int = 1,
) -> Counts:
    """Loss (without label smoothing) and accuracy over all samples of a loader; replicas share the batches."""
    device = next(model.parameters()).device
    tally, loss = MetricTally(device, team), CrossEntropy()
    topology = (team or Alone()).topology
    with evaluating(model):
        answer = answer_views(answer or quicken(model), views)
        for batch in loader.batches(batch_size, Part(topology.replica, topology.replicas)):
            logits = answer(batch.images)
            if logits is not None:
                tally.add(loss(logits, batch.labels), logits, batch.labels)
    counts = tally.read()
    assert counts.samples + len(loader.skipped) >= len(loader), f"counted {counts.samples} of {len(loader)} samples"
    return counts
