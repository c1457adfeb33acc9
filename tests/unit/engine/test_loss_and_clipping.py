"""Loss, metrics and clipping over several processes, against plain arithmetic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convolve.data.dataset import Targets
from convolve.engine.metrics import CrossEntropy, NullMetrics, RunningMetrics
from convolve.engine.step import clip_to_norm, no_clipping
from thread_collectives import run_ranks

CPU = torch.device("cpu")


def cross_entropy_by_hand(logits, target):
    log_probs = [value - math.log(sum(map(math.exp, logits))) for value in logits]
    return -sum(t * p for t, p in zip(target, log_probs, strict=True))


@pytest.mark.parametrize(
    ("smoothing", "over", "target"),
    [
        (0.0, "all", [0.0, 1.0, 0.0]),
        (0.3, "all", [0.1, 0.8, 0.1]),
        (0.3, "others", [0.15, 0.7, 0.15]),
    ],
)
def test_the_loss_is_a_sum_over_samples(smoothing, over, target):
    logits = [[1.0, -0.5, 2.0], [0.2, 0.1, 0.0]]
    expected = sum(cross_entropy_by_hand(row, target) for row in logits)
    labels = torch.tensor([1, 1])
    loss = CrossEntropy(smoothing, over)
    assert loss(torch.tensor(logits), labels).item() == pytest.approx(expected, rel=1e-5)
    mixed = Targets(torch.stack((labels, labels)), torch.tensor([[0.25, 0.5], [0.75, 0.5]]))
    assert loss(torch.tensor(logits), mixed).item() == pytest.approx(expected, rel=1e-5)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 99), parts=st.integers(1, 5))
def test_the_loss_of_a_batch_is_the_sum_over_its_micro_batches(seed, parts):
    draw = torch.Generator().manual_seed(seed)
    logits, labels = torch.randn(10, 4, generator=draw), torch.randint(0, 4, (10,), generator=draw)
    loss = CrossEntropy(0.1)
    pieces = zip(logits.tensor_split(parts), labels.tensor_split(parts), strict=True)
    assert sum(loss(x, y).item() for x, y in pieces) == pytest.approx(loss(logits, labels).item(), rel=1e-5)


def test_metrics_of_replicas_are_summed_and_of_stages_counted_once():
    """Only the last stage has logits, so the other stages add nothing."""

    def run(collectives):
        metrics = RunningMetrics(CPU, collectives)
        if collectives.topology.stage == 1:
            labels = torch.tensor([0, 1, 1 - collectives.topology.replica])
            metrics.update(torch.tensor(3.0), torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0]]), labels)
        return metrics.compute()

    results = run_ranks(run, replicas=2, stages=2)
    assert all((result.loss, result.accuracy, result.samples) == (1.0, 5 / 6, 6) for result in results)


def test_disabled_metrics_have_no_samples():
    metrics = NullMetrics()
    metrics.update(torch.tensor(1.0), torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    assert metrics.compute().samples == 0 and math.isnan(metrics.compute().loss)


def make_layer(gradient):
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([gradient])
    return layer


def test_stages_are_clipped_by_the_norm_of_the_whole_gradient():
    """The stages have the norms 3 and 4, so the whole gradient has the norm 5."""

    def run(collectives):
        layer = make_layer([3.0, 0.0] if collectives.topology.stage == 0 else [0.0, 4.0])
        clip_to_norm(1.0, collectives)(layer)
        return layer.weight.grad.flatten().tolist()

    assert run_ranks(run, replicas=1, stages=2) == [pytest.approx([0.6, 0.0]), pytest.approx([0.0, 0.8])]


def test_a_gradient_within_the_limit_keeps_its_bits():
    def run(collectives):
        layer = make_layer([0.1, 0.2])
        clip_to_norm(1.0, collectives)(layer)
        return torch.equal(layer.weight.grad, torch.tensor([[0.1, 0.2]]))

    assert run_ranks(run, replicas=1, stages=2) == [True, True]


def test_without_clipping_gradients_stay():
    layer = make_layer([1e9, -1e9])
    no_clipping(layer)
    assert layer.weight.grad.tolist() == [[1e9, -1e9]]
