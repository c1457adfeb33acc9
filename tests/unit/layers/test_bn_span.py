"""Batch norm over a span of replicas, against torch's own norm in float64 on the joined batch."""

import threading

import pytest
import torch
from torch.nn import functional

from convolve.layers.batch_norm import BatchNorm2d
from norm_steps import update_statistics

CHANNELS = 6


class Meeting:
    """The tensors of several threads."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=20)
        self.brought = [None] * count


class Member:
    """One thread in a meeting."""

    def __init__(self, meeting, number):
        self.meeting, self.number = meeting, number
        self.members = len(meeting.brought)

    def __call__(self, values):
        self.meeting.brought[self.number] = values
        self.meeting.barrier.wait()
        total = torch.stack(self.meeting.brought).sum(dim=0)
        self.meeting.barrier.wait()
        return total


def run_span(parts, gradients):
    """Forward and backward of one norm per replica, each in a thread; norms, outputs and input gradients."""
    meeting, norms, found = Meeting(len(parts)), [], [None] * len(parts)

    def work(number):
        x = parts[number].clone().requires_grad_()
        y = norms[number](x)
        y.backward(gradients[number])
        found[number] = (y.detach(), x.grad)

    for number in range(len(parts)):
        norm = BatchNorm2d(CHANNELS)
        norm.weight.data = torch.linspace(0.5, 1.5, CHANNELS)
        norm.sync(Member(meeting, number))
        norms.append(norm)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return norms, found


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2, 1)])
@pytest.mark.parametrize("spread", [1.0, 0.01])
def test_a_span_is_the_norm_of_the_joined_batch(sizes, spread):
    """Also where replicas bring different numbers of samples, and where the mean is large beside the spread."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(sizes), CHANNELS, 3, 3, generator=generator) * spread + 0.5
    gradient = torch.randn(whole.shape, generator=generator)
    norms, found = run_span(whole.split(sizes), gradient.split(sizes))

    x, weight = whole.double().requires_grad_(), norms[0].weight.detach().double().requires_grad_()
    bias = torch.zeros(CHANNELS, dtype=torch.float64, requires_grad=True)
    y = functional.batch_norm(x, None, None, weight, bias, True, 0.1, norms[0].eps)
    y.backward(gradient.double())
    torch.testing.assert_close(
        torch.cat([out for out, _ in found]).double(), y.detach(), rtol=0, atol=1e-6 + 2e-7 / spread
    )
    torch.testing.assert_close(torch.cat([grad for _, grad in found]).double(), x.grad, rtol=1e-4, atol=1e-4 / spread)
    torch.testing.assert_close(sum(norm.weight.grad for norm in norms).double(), weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sum(norm.bias.grad for norm in norms).double(), bias.grad, rtol=1e-5, atol=1e-5)


def test_a_span_counts_its_batch_once():
    """Running statistics and the number of batches are those of one replica with the joined batch."""
    whole = torch.randn(8, CHANNELS, 3, 3, generator=torch.Generator().manual_seed(1))
    norms, _ = run_span(whole.split(4), torch.ones_like(whole).split(4))
    total = sum(norm.take_sums() for norm in norms)
    alone = BatchNorm2d(CHANNELS)
    alone(whole)
    update_statistics(alone)
    norms[0].update_running_stats(total)
    torch.testing.assert_close(norms[0].running_mean, alone.running_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(norms[0].running_var, alone.running_var, rtol=1e-6, atol=1e-7)
    assert int(norms[0].num_batches_tracked) == int(alone.num_batches_tracked) == 1
