"""Gradients in buckets, and sums over the processes of one host through shared memory."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from convolve.distributed.gradient_sync import BucketedAllReduce, fill_buckets, group_by_bytes
from convolve.distributed.shared_memory import SharedMemoryAllReduce
from convolve.errors import ParallelError
from forked_commands import FORKS

NO_STOP = torch.zeros(1)


def layer():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    return model.to(memory_format=torch.channels_last)


def leave_gradients(model, scale=1.0):
    model(torch.ones(2, 3, 3, 3).to(memory_format=torch.channels_last) * scale).sum().backward()


def double(flat):
    """The sum over two replicas that hold the same."""
    flat.mul_(2)
    return lambda: None


def test_parts_of_a_bucket_lie_in_memory_as_their_parameters_do():
    model = layer()
    (bucket,) = fill_buckets(list(model.parameters()))
    assert [part.stride() for part in bucket.gradients] == [one.stride() for one in bucket.parameters]
    for number, part in enumerate(bucket.gradients):
        part.fill_(number + 1)
    assert bucket.flat[:-1].min() == 1 and bucket.flat[-1] == 0


def test_a_gradient_becomes_the_sum_and_keeps_its_layout():
    model = layer()
    leave_gradients(model)
    alone = [parameter.grad.clone() for parameter in model.parameters()]
    BucketedAllReduce(fill_buckets(list(model.parameters()), size=64), double).finish(NO_STOP)
    for parameter, one in zip(model.parameters(), alone, strict=True):
        assert parameter.grad.equal(2 * one) and parameter.grad.stride() == parameter.stride()


def test_a_parameter_without_gradient_adds_zero_and_gets_the_sum_of_the_others():
    model = layer()
    leave_gradients(model)
    model[0].weight.grad = None

    def add_one(flat):
        flat.add_(1)
        return lambda: None

    before = model[2].weight.grad.clone()
    BucketedAllReduce(fill_buckets(list(model.parameters())), add_one).finish(NO_STOP)
    assert model[0].weight.grad.eq(1).all() and model[2].weight.grad.equal(before + 1)


def test_sums_of_one_step_leave_no_trace_in_the_next():
    model = layer()
    grad_sync = BucketedAllReduce(fill_buckets(list(model.parameters())), double)
    found = []
    for _ in range(2):
        grad_sync.last_micro_batch()
        leave_gradients(model)
        grad_sync.finish(NO_STOP)
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad(set_to_none=True)
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("size", [64, 10 << 20])
def test_the_payload_is_summed_and_does_not_touch_gradients(size):
    model = layer()
    grad_sync = BucketedAllReduce(fill_buckets(list(model.parameters()), payload_size=3, size=size), double)
    for missing in (False, True):
        leave_gradients(model)
        if missing:
            model[0].bias.grad = None
        expected = 2 * model[0].weight.grad
        assert grad_sync.finish(torch.tensor([1.0, 2.0, 3.0])).tolist() == [2.0, 4.0, 6.0]
        assert model[0].weight.grad.equal(expected)
        model.zero_grad(set_to_none=True)


def test_all_processes_get_the_same_sum_in_the_order_of_ranks(tmp_path):
    world, turns = 3, 50
    SharedMemoryAllReduce.create(tmp_path / "sum", world, 5)
    sums = [SharedMemoryAllReduce(tmp_path / "sum", rank, world, 5) for rank in range(world)]
    random = torch.Generator().manual_seed(0)
    parts = torch.randn(turns, world, 5, generator=random)
    found = torch.zeros(world, turns, 5)

    def run(rank):
        for turn in range(turns):
            flat = parts[turn, rank].clone()
            sums[rank](flat)()
            found[rank, turn] = flat

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = parts[:, 0] + parts[:, 1] + parts[:, 2]
    assert all(found[rank].equal(expected) for rank in range(world))


def test_many_buckets_under_way_do_not_overwrite_each_other(tmp_path):
    """Finished only at the end, as gradients are; one process is much slower than the other."""
    SharedMemoryAllReduce.create(tmp_path / "sum", 2, 4)
    sums = [SharedMemoryAllReduce(tmp_path / "sum", rank, 2, 4) for rank in range(2)]
    flats = [[torch.full((4,), 10.0**number * (rank + 1)) for number in range(6)] for rank in range(2)]

    def run(rank):
        finishes = []
        for flat in flats[rank]:
            time.sleep(0.01 * rank)
            finishes.append(sums[rank](flat))
        for finish in finishes:
            finish()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        assert [flat[0].item() for flat in flats[rank]] == [3 * 10.0**number for number in range(6)]


def test_a_process_that_waits_for_a_dead_one_ends_immediately(tmp_path):
    SharedMemoryAllReduce.create(tmp_path / "sum", 2, 4)
    other = FORKS.Process(target=SharedMemoryAllReduce, args=(tmp_path / "sum", 1, 2, 4))
    other.start()
    other.join()
    assert other.exitcode == 0
    alone = SharedMemoryAllReduce(tmp_path / "sum", 0, 2, 4)
    with pytest.raises(ParallelError, match="rank 1 exited"):
        alone(torch.zeros(4))()


@given(st.lists(st.integers(0, 200), max_size=40), st.integers(1, 100))
def test_groups_are_consecutive_small_enough_and_as_few_as_neighbors_allow(sizes, limit):
    groups = group_by_bytes(sizes, limit)
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    assert all(group for group in groups)
    totals = [sum(sizes[index] for index in group) for group in groups]
    assert all(total <= limit or len(group) == 1 for total, group in zip(totals, groups, strict=True))
    for total, following in zip(totals, groups[1:], strict=False):
        assert total + sizes[following[0]] > limit


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(4, 300),
    st.data(),
)
def test_buckets_sum_every_gradient_and_the_payload_for_any_order_of_arrival(shapes, payload_size, size, data):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    sent = []

    def double_later(flat):
        sent.append(flat)
        return lambda: flat.mul_(2)

    buckets = fill_buckets(parameters, payload_size, size)
    assert [parameter for bucket in buckets for parameter in bucket.parameters] == parameters[::-1]
    grad_sync = BucketedAllReduce(buckets, double_later)
    order = data.draw(st.permutations(range(len(parameters))))
    with_gradient = data.draw(st.sets(st.sampled_from(range(len(parameters)))))
    payload = torch.arange(1.0, payload_size + 1)
    for _ in range(2):
        grad_sync.last_micro_batch()
        for index in order:
            if index in with_gradient:
                (parameters[index] * (index + 1)).sum().backward()
        assert grad_sync.finish(payload).equal(2 * payload)
        for index, parameter in enumerate(parameters):
            assert parameter.grad.eq(2 * (index + 1) * (index in with_gradient)).all()
            parameter.grad = None
    assert [flat.data_ptr() for flat in sent] == [bucket.flat.data_ptr() for bucket in buckets] * 2


def test_buckets_are_sent_during_the_last_backward_pass_only():
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    sent = []

    def count(flat):
        sent.append(flat)
        return lambda: None

    grad_sync = BucketedAllReduce(fill_buckets(parameters, 1, 16), count)
    (parameters[0] + parameters[1] + parameters[2]).sum().backward()
    assert sent == []
    grad_sync.last_micro_batch()
    parameters[1].sum().backward()
    assert sent == []  # the bucket before it is not complete
    parameters[2].sum().backward()
    assert len(sent) == 2
    grad_sync.finish(NO_STOP)
    assert len(sent) == 3
