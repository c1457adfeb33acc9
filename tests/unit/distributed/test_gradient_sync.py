"""Gradients in buckets, and sums over the processes of one host through shared memory."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from convolve.distributed.gradient_sync import BucketedSum, LocalSum, fill_buckets, group_by_bytes
from convolve.distributed.node_sum import SumLayout, bound_nodes, plain_add, sum_nodes
from convolve.distributed.shared_memory import SharedMemoryAllReduce
from convolve.errors import ParallelError
from convolve.numerics.execution import PlainExecution
from convolve.summation import cover
from forked_commands import FORKS

NO_STOP = [torch.zeros(1)]
ONE_EACH = {world: [cover(range(rank, rank + 1), world) for rank in range(world)] for world in (2, 3)}


def layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    return model.to(memory_format=torch.channels_last)


def reference_gradients():
    """The gradients of the same model without a sync."""
    model = layer()
    leave_gradients(model)
    return [parameter.grad for parameter in model.parameters()]


def leave_gradients(model, scale=1.0):
    model(torch.ones(2, 3, 3, 3).to(memory_format=torch.channels_last) * scale).sum().backward()


def double(flats, out, nodes, add):
    """The sum over two replicas that hold the same."""
    out.mul_(2)
    return lambda: None


def make_sync(model, transport=double, size=10 << 20, payload_size=1):
    """Return the sync of the first of two replicas that run one micro batch each, in its backward pass."""
    layout = SumLayout(replicas=2)
    execution = PlainExecution()
    sync = BucketedSum(model, layout, execution, lambda capacity: transport, payload_size, bucket_bytes=size)
    sync.start(range(1), 2)
    sync.last_micro_batch(0)
    return sync


def test_parts_of_a_bucket_lie_in_memory_as_their_parameters_do():
    model = layer()
    (bucket,) = fill_buckets(list(model.named_parameters()))
    assert [part.stride() for part in bucket.gradients] == [one.stride() for one in bucket.parameters]
    for number, part in enumerate(bucket.gradients):
        part.fill_(number + 1)
    assert bucket.flat[:-1].min() == 1 and bucket.flat[-1] == 0


def test_a_gradient_becomes_the_sum_and_keeps_its_layout():
    model = layer()
    sync = make_sync(model, size=64)
    leave_gradients(model)
    alone = reference_gradients()
    sync.finish(NO_STOP)
    for parameter, one in zip(model.parameters(), alone, strict=True):
        assert parameter.grad.equal(2 * one) and parameter.grad.stride() == parameter.stride()


def test_a_parameter_without_gradient_adds_zero_and_gets_the_sum_of_the_others():
    def add_one(flats, out, nodes, add):
        out.add_(1)
        return lambda: None

    model = layer()
    sync = make_sync(model, add_one)
    leave_gradients(model)
    model[0].weight.grad = None
    before = model[2].weight.grad.clone()
    sync.finish(NO_STOP)
    assert model[0].weight.grad.eq(1).all() and model[2].weight.grad.equal(before + 1)


def test_sums_of_one_step_leave_no_trace_in_the_next():
    model = layer()
    grad_sync = make_sync(model)
    found = []
    for _ in range(2):
        grad_sync.start(range(1), 2)
        grad_sync.last_micro_batch(0)
        leave_gradients(model)
        grad_sync.finish(NO_STOP)
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad(set_to_none=True)
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("size", [64, 10 << 20])
def test_the_payload_is_summed_and_does_not_touch_gradients(size):
    model = layer()
    grad_sync = make_sync(model, size=size, payload_size=3)
    for missing in (False, True):
        grad_sync.start(range(1), 2)
        grad_sync.last_micro_batch(0)
        for parameter, gradient in zip(model.parameters(), reference_gradients(), strict=True):
            parameter.grad = gradient.clone()
        if missing:
            model[0].bias.grad = None
        expected = 2 * model[0].weight.grad
        assert grad_sync.finish([torch.tensor([1.0, 2.0, 3.0])]).tolist() == [2.0, 4.0, 6.0]
        assert model[0].weight.grad.equal(expected)
        model.zero_grad(set_to_none=True)


def test_all_processes_get_the_same_sum_in_the_order_of_the_tree(tmp_path):
    world, turns = 3, 50
    SharedMemoryAllReduce.create(tmp_path / "sum", world, (1, 5))
    sums = [SharedMemoryAllReduce(tmp_path / "sum", rank, world, (1, 5)) for rank in range(world)]
    random = torch.Generator().manual_seed(0)
    parts = torch.randn(turns, world, 5, generator=random)
    found = torch.zeros(world, turns, 5)

    def run(rank):
        for turn in range(turns):
            flat = parts[turn, rank].clone()
            sums[rank]([flat], flat, ONE_EACH[world], plain_add)()
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
    SharedMemoryAllReduce.create(tmp_path / "sum", 2, (1, 4))
    sums = [SharedMemoryAllReduce(tmp_path / "sum", rank, 2, (1, 4)) for rank in range(2)]
    flats = [[torch.full((4,), 10.0**number * (rank + 1)) for number in range(6)] for rank in range(2)]

    def run(rank):
        finishes = []
        for flat in flats[rank]:
            time.sleep(0.01 * rank)
            finishes.append(sums[rank]([flat], flat, ONE_EACH[2], plain_add))
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
    SharedMemoryAllReduce.create(tmp_path / "sum", 2, (1, 4))
    other = FORKS.Process(target=SharedMemoryAllReduce, args=(tmp_path / "sum", 1, 2, (1, 4)))
    other.start()
    other.join()
    assert other.exitcode == 0
    alone, flat = SharedMemoryAllReduce(tmp_path / "sum", 0, 2, (1, 4)), torch.zeros(4)
    with pytest.raises(ParallelError, match="rank 1 exited"):
        alone([flat], flat, ONE_EACH[2], plain_add)()


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

    def double_later(flats, out, nodes, add):
        sent.append(out)
        return lambda: out.mul_(2)

    grad_sync = make_sync(nn.ParameterList(parameters), double_later, size, payload_size)
    buckets = grad_sync.buckets
    assert [id(parameter) for bucket in buckets for parameter in bucket.parameters] == [*map(id, parameters[::-1])]
    order = data.draw(st.permutations(range(len(parameters))))
    with_gradient = data.draw(st.sets(st.sampled_from(range(len(parameters)))))
    payload = torch.arange(1.0, payload_size + 1)
    for _ in range(2):
        grad_sync.start(range(1), 2)
        grad_sync.last_micro_batch(0)
        for index in order:
            if index in with_gradient:
                (parameters[index] * (index + 1)).sum().backward()
        assert grad_sync.finish([payload]).equal(2 * payload)
        for index, parameter in enumerate(parameters):
            assert parameter.grad.eq(2 * (index + 1) * (index in with_gradient)).all()
            parameter.grad = None
    assert [flat.data_ptr() for flat in sent] == [bucket.flat.data_ptr() for bucket in buckets] * 2


def test_buckets_are_sent_during_the_last_backward_pass_only():
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    sent = []

    def count(flats, out, nodes, add):
        sent.append(out)
        return lambda: None

    grad_sync = make_sync(nn.ParameterList(parameters), count, 16)
    grad_sync.finish(NO_STOP)
    sent.clear()
    grad_sync.start(range(2), 4)
    (parameters[0] + parameters[1] + parameters[2]).sum().backward()
    grad_sync.end_micro_batch(0)
    assert sent == []
    grad_sync.last_micro_batch(1)
    parameters[1].sum().backward()
    assert sent == []  # the bucket before it is not complete
    parameters[2].sum().backward()
    assert len(sent) == 2
    grad_sync.finish(NO_STOP)
    assert len(sent) == 3


def split_gradients(parts, cuts, layout):
    """Sum random gradients as replicas with consecutive leaves do, without processes; return the sums of each replica.

    `parts` [leaves, elements]; replica r has the leaves from cuts[r] to cuts[r + 1] - 1.
    """
    count = len(parts)
    values, nodes = [], []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        parameter = nn.Parameter(torch.zeros(parts.shape[1]))
        sync = LocalSum(nn.ParameterList([parameter]), layout, PlainExecution())
        sync.start(range(start, stop), count)
        for leaf in range(start, stop):
            parameter.grad = parts[leaf].clone()
            (sync.last_micro_batch if leaf == stop - 1 else sync.end_micro_batch)(leaf)
        values.append([gradients[0] for gradients in sync.nodes(slice(None))])
        nodes.append(cover(range(start, stop), count))
    return sum_nodes(values, nodes, plain_add)


@settings(deadline=None)
@given(st.integers(1, 20), st.data())
def test_any_division_of_micro_batches_among_replicas_gives_the_same_bits(count, data):
    """With exponents so different that almost every order of a plain sum has other bits."""
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    parts = torch.randn(count, 64, generator=random) * 2.0 ** torch.randint(-12, 12, (count, 64), generator=random)
    whole = split_gradients(parts, [0, count], SumLayout())
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=6)))
    assert split_gradients(parts, [0, *cuts, count], SumLayout()).equal(whole)


def test_a_micro_batch_without_a_readable_sample_adds_nothing():
    parameter = nn.Parameter(torch.zeros(3))
    sync = LocalSum(nn.ParameterList([parameter]), SumLayout(accumulation=4), PlainExecution())
    sync.start(range(4), 4)
    parameter.grad = torch.full((3,), 2.0)
    sync.end_micro_batch(1)
    parameter.grad = torch.full((3,), 5.0)
    sync.last_micro_batch(2)
    sync.finish(NO_STOP)
    assert parameter.grad.tolist() == [7.0] * 3


@pytest.mark.parametrize(("replicas", "span", "count"), [(4, 1, 8), (3, 1, 8), (4, 2, 16), (8, 2, 16), (2, 2, 7)])
def test_the_nodes_of_all_replicas_cover_every_leaf_once(replicas, span, count):
    layout = SumLayout(replicas, -(-count // replicas), span)
    leaves = [
        leaf
        for nodes in layout.nodes(count)
        for first, size in nodes
        for leaf in range(first, min(first + size, count))
    ]
    assert sorted(leaves) == list(range(count))
    assert max(map(len, layout.nodes(count))) <= 2 and layout.most_nodes <= 4


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("accumulation", [*range(1, 12), 31, 64])
def test_the_bound_for_thousands_of_micro_batches_is_never_exceeded(replicas, accumulation):
    assert SumLayout(replicas, accumulation).most_nodes <= bound_nodes(accumulation)
