"""Layouts, predicted steps and suggestions of a model with four blocks, computed by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convolve.config.loading import build
from convolve.distributed.gradient_sync import BUCKET_BYTES
from convolve.planning.costs import Costs, calculate_costs, state_bytes, workload
from convolve.planning.memory import BlockCost, MemoryModel, StateBytes, Workload
from convolve.planning.pipeline_sim import StageTime, simulate
from convolve.planning.plan import Hardware
from convolve.planning.step_time import ETHERNET, MEMORY, Layout, Link, Replication, StageWork, predict_step
from convolve.planning.suggestions import largest_batch, suggest_changes

FREE = Link(latency=0.0, bandwidth=float("inf"))


def block(name, trained=100, *, kept=10, split_point=True, multiply_adds=1000):
    return BlockCost(name, trained, trained, multiply_adds, input_values=5, kept_values=kept, split_point=split_point)


def layout(times=(1.0, 2.0, 3.0, 4.0), *, limit=10**9, schedule="gpipe", micro_batches=4, samples=2, **options):
    """Blocks a, b, ... with a backward pass as long as the forward pass."""
    works = tuple(
        StageWork(block(name, **options), seconds, seconds) for name, seconds in zip("abcdef", times, strict=False)
    )
    return Layout(works, (0,), schedule, micro_batches, MemoryModel(StateBytes(), Workload(samples), limit))


def test_a_layout_is_split_at_named_blocks():
    split = layout().split_at(("b", "d"))
    assert split.stage_starts == (0, 1, 3)
    assert split.splits == ("b", "d")
    assert [[work.block.name for work in stage] for stage in split.stages] == [["a"], ["b", "c"], ["d"]]


def test_rebalancing_minimizes_the_slowest_stage():
    slowest = max(sum(work.forward for work in stage) for stage in layout().rebalanced(2).stages)
    assert slowest == min(max(1 + 2 + 3, 4), max(1 + 2, 3 + 4), max(1, 2 + 3 + 4))


def test_rebalancing_starts_stages_only_at_split_points():
    works = list(layout((1.0, 1.0, 1.0, 1.0)).works)
    works[2] = replace(works[2], block=block("c", split_point=False))
    balanced = replace(layout(), works=tuple(works)).rebalanced(2)
    assert balanced.splits in (("b",), ("d",))


def test_rebalancing_prefers_a_slower_split_that_fits():
    """By time alone, d would have a stage to itself; then a to c do not fit."""
    free = layout((1.0, 1.0, 1.0, 3.0), schedule="sequential")
    assert free.rebalanced(2).splits == ("d",)
    need = free.split_at(("c",)).memory(0).total
    tight = replace(free, memory_model=replace(free.memory_model, limit=need)).rebalanced(2)
    assert tight.fits and tight.splits == ("c",)


def test_rebalancing_without_a_split_that_fits_ignores_memory():
    tight = layout((1.0, 1.0, 1.0, 3.0), limit=1).rebalanced(2)
    assert tight.splits == ("d",) and not tight.fits


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", 4), ("grouped", 3), ("interleaved", 2), ("sequential", 1)])
def test_memory_of_a_stage_counts_the_micro_batches_in_flight(schedule, held):
    split = layout(schedule=schedule).split_at(("c",))
    assert split.in_flight(0) == held
    memory = split.memory(0)
    assert (memory.weights, memory.gradients, memory.optimiser) == (800, 800, 0)
    assert memory.activations == 4 * 2 * held * 20


def test_messages_carry_the_input_of_the_next_stage():
    """2 samples of 5 values of 4 bytes at 1000 bytes/s, and the latency: 0.05 s each way."""
    split = layout(schedule="sequential", micro_batches=1).split_at(("c",))
    schedule = split.simulate(Link(latency=0.01, bandwidth=1000.0))
    assert schedule.seconds == pytest.approx(2 * (1 + 2 + 3 + 4) + 2 * 0.05)


def test_a_single_process_has_no_exposed_communication():
    one = layout(schedule="sequential", micro_batches=3)
    step = predict_step(one, one.simulate(FREE), Replication(1, Link(9.0, 1.0), 0.001, 4))
    assert (step.passes, step.exposed, step.update) == pytest.approx((60.0, 0.0, 0.4))
    assert step.total == pytest.approx(60.4)


def test_one_bucket_is_summed_after_the_backward_pass():
    one = layout(schedule="sequential", micro_batches=1)
    link = Link(latency=0.5, bandwidth=100.0)
    step = predict_step(one, one.simulate(FREE), Replication(4, link, 0.0, 4))
    assert step.exposed == pytest.approx(2 * 3 * (0.5 + 4 * 400 / 4 / 100))


def test_a_full_bucket_of_the_last_blocks_is_hidden_behind_the_first():
    weights = BUCKET_BYTES // 4
    one = layout((10.0, 1.0), trained=weights, schedule="sequential", micro_batches=1)
    link = Link(latency=0.0, bandwidth=float(BUCKET_BYTES))
    step = predict_step(one, one.simulate(FREE), Replication(2, link, 0.0, 4))
    assert step.exposed == pytest.approx(1.0), "the sum of block b takes 1 s of the 10 s of block a"


def test_the_update_counts_the_stage_that_ends_last():
    """Stage 0 ends its backward pass last; stage 1 has time to update before."""
    split = layout((1.0, 1.0), schedule="grouped", micro_batches=1).split_at(("b",))
    step = predict_step(split, split.simulate(FREE), Replication(1, FREE, 0.005, 4))
    assert (step.passes, step.update) == pytest.approx((4.0, 0.5))


@given(
    st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from(["grouped", "interleaved", "sequential"]),
)
def test_a_step_is_at_least_as_long_as_its_slowest_stage_and_at_most_sequential(times, micro_batches, schedule):
    stages = [StageTime(seconds, 2 * seconds) for seconds in times]
    seconds = simulate(schedule, stages, micro_batches).seconds
    assert seconds >= 3 * micro_batches * max(times) * (1 - 1e-9)
    assert seconds <= 3 * micro_batches * sum(times) * (1 + 1e-9)


@given(st.integers(2, 5), st.integers(1, 6), st.floats(0, 1))
def test_slower_messages_never_shorten_a_step(stages, micro_batches, message):
    fast, slow = (
        simulate("interleaved", [StageTime(1.0, 2.0, delay)] * stages, micro_batches).seconds
        for delay in (0.0, message)
    )
    assert fast <= slow + 1e-9


def test_times_are_calculated_from_multiply_adds():
    config = build({"batch_size": 8})
    blocks = [block("pad", trained=0, multiply_adds=0), block("a", multiply_adds=1000), block("b", multiply_adds=500)]
    costs = calculate_costs(config, blocks, flops=1e6)
    assert [time.forward for time in costs.blocks] == pytest.approx([0, 0.016, 0.008])
    assert [time.backward for time in costs.blocks] == pytest.approx([0, 0.016, 0.016]), "a needs no input gradient"
    assert costs.update == 0 and costs.source == "calculated for a device with 1e-06 Tflop/s, updates not counted"


def test_frozen_blocks_before_the_first_trained_one_have_no_backward_pass():
    blocks = [block("a", trained=0), block("b"), block("c", trained=0)]
    costs = calculate_costs(build({"batch_size": 1}), blocks, flops=2000.0)
    assert [time.backward for time in costs.blocks] == [0, 1, 2]


def test_processes_that_share_a_core_slow_each_other_down():
    costs = calculate_costs(build({}), [block("a")], flops=1e12)
    assert costs.scaled(1) is costs
    doubled = replace(costs, update=0.5).scaled(2)
    assert doubled.blocks[0].forward == 2 * costs.blocks[0].forward and doubled.update == 1.0
    assert doubled.source.endswith(", 2 processes on each core")
    assert isinstance(doubled, Costs)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"optimizer": "sgd"}, StateBytes()),
        ({"optimizer": "momentum"}, StateBytes(first_moments=1)),
        ({"optimizer": "adam"}, StateBytes(first_moments=1, second_moments=1)),
        ({"optimizer": "momentum", "ema_decay": 0.9}, StateBytes(first_moments=1, averages=1)),
        ({"optimizer": "momentum", "precision": "16.32"}, StateBytes(4, 2, first_moments=1)),
        ({"optimizer": "momentum", "precision": "16.16"}, StateBytes(2, 2, first_moments=1)),
        ({"optimizer": "momentum", "replicas": 4}, StateBytes(first_moments=1)),
        ({"optimizer": "momentum", "replicas": 4, "rts": True}, StateBytes(first_moments=1, sharers=4)),
    ],
)  # fmt: skip
def test_bytes_of_the_state_follow_from_optimizer_precision_and_sharding(options, expected):
    assert state_bytes(build(options)) == expected


@pytest.mark.parametrize(
    ("options", "checkpoints"),
    [
        ({}, None),
        ({"enable_recomputation": True}, {"layer1/0", "layer1/1", "fc"}),
        ({"enable_recomputation": True, "recompute_checkpoints": ("layer*/1",)}, {"layer1/1"}),
        ({"enable_recomputation": True, "recompute_checkpoints": ("layer*/1", "fc")}, {"layer1/1", "fc"}),
    ],
)
def test_recomputation_keeps_the_activations_after_matching_blocks(options, checkpoints):
    blocks = [block(name) for name in ("layer1/0", "layer1/1", "fc")]
    load = workload(build({"batch_size": 6, **options}), blocks)
    assert load.samples == 6
    assert load.checkpoints == checkpoints


@pytest.mark.parametrize(
    ("hardware", "link"),
    [
        (Hardware(), MEMORY),
        (Hardware(hosts=2), ETHERNET),
        (Hardware(latency=1.0), Link(1.0, MEMORY.bandwidth)),
        (Hardware(hosts=2, bandwidth=5.0), Link(ETHERNET.latency, 5.0)),
        (Hardware(hosts=2, latency=1.0, bandwidth=5.0), Link(1.0, 5.0)),
    ],
)
def test_the_link_is_that_of_the_hosts_unless_given(hardware, link):
    assert hardware.link() == link


def test_the_largest_batch_is_exact():
    """Weights and gradients of 4 blocks: 3200 bytes; activations: 4 micro batches of 40 values, 640 bytes a sample."""
    for limit, samples in ((3199, 0), (3839, 0), (3840, 1), (3200 + 7 * 640, 7), (3200 + 8 * 640 - 1, 7)):
        assert largest_batch(layout(limit=limit)) == samples


def changes(limit, *, kept=10, schedule="gpipe", **options):
    requested = "grouped" if schedule == "gpipe" else schedule
    values = {"batch_size": 2, "gradient_accumulation_count": 4, "pipeline_schedule": requested, **options}
    return list(suggest_changes(build(values), layout(limit=limit, kept=kept, schedule=schedule)))


def test_a_run_that_fits_needs_no_change():
    assert changes(limit=3200 + 2 * 640) == []


def test_a_run_that_almost_fits_is_offered_single_changes():
    """Recomputation keeps 4 x 20 inputs and one block of 10 values for each of 2 samples: 720 bytes."""
    found = changes(limit=3200 + 720)
    assert "--batch-size 1: fits; --gradient-accumulation-count 8 keeps the global batch near" in found
    assert "--enable-recomputation: fits" in found
    assert "--enable-recomputation: fits" not in changes(limit=3200 + 719)
    assert not any(line.startswith("--rts") for line in found), "sgd has no state to shard"


def test_a_grouped_run_is_offered_the_schedule_that_holds_fewer_micro_batches():
    """Stage 0 of 2 needs 1600 bytes and 160 for each micro batch: 3 of them if grouped, 2 if interleaved."""
    config = build({"batch_size": 2, "gradient_accumulation_count": 4, "pipeline_schedule": "grouped", "shards": 2})
    split = layout(limit=2000, schedule="grouped").split_at(("c",))
    assert "--pipeline-schedule interleaved: fits" in list(suggest_changes(config, split))


def test_a_run_that_does_not_fit_at_all_is_offered_larger_devices():
    assert changes(limit=10) == ["no change that was tried is enough; use devices with more memory"]


def test_a_schedule_that_holds_one_micro_batch_is_not_rescheduled():
    assert not any("--pipeline-schedule" in line for line in changes(limit=3200 + 100, schedule="sequential"))
