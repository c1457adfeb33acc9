"""Messages and memory of stages, computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convolve.distributed.gradient_sync import BUCKET_BYTES
from convolve.planning.memory import BlockCost, MemoryModel, StateBytes, Workload
from convolve.planning.step_time import Link, StageWork, finish_all_reduces, ready_buckets, ring_bytes

LINK = Link(latency=0.001, bandwidth=1000.0)
BLOCKS = [
    BlockCost("a", parameters=100, trained=100, multiply_adds=0, input_values=10, kept_values=50),
    BlockCost("b", parameters=300, trained=200, multiply_adds=0, input_values=20, kept_values=70),
    BlockCost("c", parameters=0, trained=0, multiply_adds=0, input_values=30, kept_values=30),
]


def need(storage=None, load=None, micro_batches=1):
    return MemoryModel(storage or StateBytes(), load or Workload(samples=2), limit=10_000).need(BLOCKS, micro_batches)


def test_a_member_of_a_ring_sends_all_parts_but_one_twice():
    assert ring_bytes(800, 8) == 2 * 7 * 100
    assert LINK.all_reduce_seconds(800, 8) == pytest.approx(2 * 7 * (0.001 + 0.1))
    assert LINK.all_reduce_seconds(800, 1) == 0


def test_sums_that_are_ready_early_are_hidden_behind_the_rest_of_the_backward_pass():
    each = LINK.all_reduce_seconds(100, 2)
    assert finish_all_reduces([(0.0, 100), (10.0, 100)], LINK, 2) == pytest.approx(10 + each)
    assert finish_all_reduces([(10.0, 100), (10.0, 100)], LINK, 2) == pytest.approx(10 + 2 * each)
    assert finish_all_reduces([(10.0, 100)], LINK, 1) == 10


def test_memory_in_32_bits_is_four_bytes_of_everything():
    found = need(StateBytes(first_moments=1, second_moments=1))
    assert (found.weights, found.gradients, found.optimiser) == (4 * 400, 4 * 300, 8 * 300)
    assert found.activations == 4 * 2 * 150
    assert found.total == 1600 + 1200 + 2400 + 1200


def test_narrow_computation_keeps_a_copy_of_the_weights():
    mixed = need(StateBytes(weight_bytes=4, compute_bytes=2, first_moments=1))
    assert (mixed.weights, mixed.activations) == (6 * 400, 2 * 2 * 150)
    half = need(StateBytes(weight_bytes=2, compute_bytes=2, first_moments=1, second_moments=1))
    assert (half.weights, half.gradients, half.optimiser) == (2 * 400, 2 * 300, (2 + 4) * 300)


def test_a_running_average_is_one_more_set_of_weights():
    assert need(StateBytes(averages=1)).weights - need().weights == 4 * 300


def test_sharded_state_is_divided_by_the_replicas():
    assert need(StateBytes(first_moments=1, sharers=7)).optimiser == -(-4 * 300 // 7)


def test_held_micro_batches_multiply_activations_and_nothing_else():
    one, eight = need(micro_batches=1), need(micro_batches=8)
    assert eight.activations == 8 * one.activations
    assert eight.weights == one.weights


def test_recomputation_keeps_inputs_and_one_segment():
    every = need(load=Workload(2, frozenset("abc")), micro_batches=4)
    assert every.activations == 4 * 2 * (4 * (10 + 20 + 30) + 70)
    one = need(load=Workload(2, frozenset("b")), micro_batches=4)
    assert one.activations == 4 * 2 * (4 * (10 + 30) + 120)


def test_a_limit_is_kept_to_the_byte():
    exact = need().total
    assert MemoryModel(StateBytes(), Workload(2), exact).fits(BLOCKS, 1)
    assert not MemoryModel(StateBytes(), Workload(2), exact - 1).fits(BLOCKS, 1)


def stage_work(trained, backward=1.0):
    return StageWork(BlockCost("x", trained, trained, 0, 1, 1), forward=0.0, backward=backward)


def test_buckets_are_ready_from_the_last_block_on_and_the_last_one_after_the_backward_pass():
    half = BUCKET_BYTES // 8
    stage = [stage_work(0), stage_work(half), stage_work(half), stage_work(0), stage_work(half)]
    assert ready_buckets(stage, 4) == [(3.0, 8 * half), (5.0, 4 * half)]
    assert ready_buckets([stage_work(0), stage_work(0)], 4) == []


@given(st.lists(st.integers(0, BUCKET_BYTES), min_size=1, max_size=12))
def test_buckets_carry_every_gradient_once_in_the_order_of_time(trained):
    ready = ready_buckets([stage_work(weights) for weights in trained], 4)
    assert sum(size for _, size in ready) == 4 * sum(trained)
    assert [moment for moment, _ in ready] == sorted(moment for moment, _ in ready)
    assert not ready or ready[-1][0] == len(trained)
