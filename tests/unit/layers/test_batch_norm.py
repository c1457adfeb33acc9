import pytest
import torch
from torch import nn

from convolve.layers.batch_norm import BatchNorm2d, NormStatistics
from norm_steps import update_statistics


def make_pair(**options):
    torch.manual_seed(0)
    ours, theirs = BatchNorm2d(5, **options), nn.BatchNorm2d(5, **options)
    with torch.no_grad():
        for layer in (ours, theirs):
            layer.weight.copy_(torch.linspace(0.5, 1.5, 5))
            layer.bias.copy_(torch.linspace(-1, 1, 5))
    return ours, theirs


def test_one_micro_batch_per_step_is_what_torch_does():
    ours, theirs = make_pair(momentum=0.3)
    for step in range(4):
        x = torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(step))
        a, b = (x.clone().requires_grad_() for _ in range(2))
        out, expected = ours(a), theirs(b)
        (out.square().sum()).backward()
        (expected.square().sum()).backward()
        update_statistics(ours)
        assert torch.equal(out, expected) and torch.equal(a.grad, b.grad)
    assert torch.allclose(ours.running_mean, theirs.running_mean, atol=1e-6)
    assert torch.allclose(ours.running_var, theirs.running_var, atol=1e-6)
    assert ours.num_batches_tracked == theirs.num_batches_tracked
    x = torch.randn(2, 5, 3, 3)
    assert torch.allclose(ours.eval()(x), theirs.eval()(x), atol=1e-5)


def test_statistics_move_once_per_step_by_the_mean_over_micro_batches():
    norm, _ = make_pair(momentum=0.25)
    parts = [torch.randn(n, 5, 2, 2) + n for n in (4, 4, 2)]
    for part in parts:
        norm(part)
    update_statistics(norm)
    means = torch.stack([part.mean(dim=(0, 2, 3)) for part in parts])
    variances = torch.stack([part.var(dim=(0, 2, 3)) for part in parts])
    weights = torch.tensor([4.0, 4.0, 2.0])[:, None] / 10
    assert torch.allclose(norm.running_mean, 0.25 * (means * weights).sum(0), atol=1e-6)
    assert torch.allclose(norm.running_var, 0.75 + 0.25 * (variances * weights).sum(0), atol=1e-6)
    assert norm.num_batches_tracked == 3


def test_a_skipped_step_leaves_no_trace():
    norm, _ = make_pair()
    norm(torch.full((2, 5, 2, 2), float("inf")))
    NormStatistics(norm)
    norm(torch.randn(4, 5, 2, 2))
    update_statistics(norm)
    assert norm.running_mean.isfinite().all()
    assert norm.num_batches_tracked == 1


def test_recomputed_layers_are_not_counted_twice():
    norm, _ = make_pair()
    norm(torch.randn(4, 5, 2, 2))
    norm.accumulate_stats = False
    norm(torch.randn(4, 5, 2, 2))
    norm.accumulate_stats = True
    update_statistics(norm)
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_empty_replica_adds_nothing(order):
    """Two replicas of which one had no samples: both update from the sums of the other."""
    busy, idle = make_pair()[0], make_pair()[0]
    busy(torch.randn(4, 5, 2, 2))
    sums = [norm.take_sums() for norm in (busy, idle)]
    total = sums[order[0]] + sums[order[1]]
    busy.update_running_stats(total)
    idle.update_running_stats(total)
    assert torch.equal(busy.running_mean, idle.running_mean)
    assert idle.num_batches_tracked == 1


def test_a_frozen_norm_stays_as_it_is():
    norm, _ = make_pair()
    before = norm.running_mean.clone()
    norm.eval()(torch.randn(4, 5, 2, 2))
    update_statistics(norm)
    assert torch.equal(norm.running_mean, before)


@pytest.mark.parametrize("affine", [True, False])
def test_one_value_per_channel_becomes_the_bias_and_is_not_counted(affine):
    norm, _ = make_pair()
    norm.affine = affine
    before = norm.running_mean.clone(), norm.running_var.clone()
    x = torch.randn(1, 5, 1, 1, requires_grad=True)
    out = norm(x)
    out.square().sum().backward()
    assert torch.equal(out.flatten(), norm.bias if affine else torch.zeros(5))
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert not norm.has_sums
    norm(torch.randn(4, 5, 2, 2))
    update_statistics(norm)
    assert not torch.equal(norm.running_mean, before[0]) and norm.running_var.isfinite().all()


def test_a_step_of_one_value_per_channel_keeps_the_running_statistics():
    norm, _ = make_pair()
    norm(torch.randn(1, 5, 1, 1))
    before = norm.state_dict()
    statistics = NormStatistics(norm)
    statistics.update_running_stats(statistics.pending_sums)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
