"""The order of the passes of each stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convolve.distributed.pipeline import SCHEDULES, Pass, count_in_flight, effective_schedule, ideal_bubble

STAGES, MICRO_BATCHES = st.integers(1, 6), st.integers(1, 12)


@given(st.sampled_from(sorted(SCHEDULES)), STAGES, MICRO_BATCHES, st.data())
def test_every_stage_runs_both_passes_of_every_micro_batch_in_the_order_of_a_single_process(schedule, stages, m, data):
    tasks = SCHEDULES[schedule](data.draw(st.integers(0, stages - 1)), stages, m)
    for direction in Pass:
        assert [index for kind, index in tasks if kind is direction] == list(range(m))
    for index in range(m):
        assert tasks.index((Pass.FORWARD, index)) < tasks.index((Pass.BACKWARD, index))


@given(STAGES, MICRO_BATCHES, st.data())
def test_a_stage_holds_the_documented_number_of_micro_batches(stages, m, data):
    stage = data.draw(st.integers(0, stages - 1))
    held = {schedule: count_in_flight(schedule, stage, stages, m) for schedule in SCHEDULES}
    assert held == {
        "gpipe": m,
        "grouped": min(m, 2 * (stages - stage) - 1),
        "interleaved": min(m, stages - stage),
        "sequential": 1,
    }


@pytest.mark.parametrize("requested", sorted(SCHEDULES))
def test_one_stage_is_sequential_and_too_few_micro_batches_run_forward_first(requested):
    assert effective_schedule(requested, 1, 8) == "sequential"
    assert effective_schedule(requested, 4, 4) == requested
    assert effective_schedule(requested, 4, 3) == ("sequential" if requested == "sequential" else "gpipe")


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "bubble"),
    [
        ("grouped", 4, 12, 3 / 15),
        ("interleaved", 4, 12, 3 / 15),
        ("grouped", 2, 1, 1 / 2),
        ("interleaved", 1, 5, 0.0),
        ("sequential", 4, 12, 3 / 4),
        ("sequential", 1, 5, 0.0),
    ],
)
def test_the_bubble_of_equal_stages_is_that_of_the_formula(schedule, stages, micro_batches, bubble):
    assert ideal_bubble(schedule, stages, micro_batches) == pytest.approx(bubble)


@pytest.mark.parametrize(
    ("schedule", "stage", "passes"),
    [
        ("gpipe", 0, "F0 F1 F2 B0 B1 B2"),
        ("gpipe", 1, "F0 F1 F2 B0 B1 B2"),
        ("grouped", 0, "F0 F1 F2 B0 B1 B2"),
        ("grouped", 1, "F0 B0 F1 B1 F2 B2"),
        ("interleaved", 0, "F0 F1 B0 F2 B1 B2"),
        ("interleaved", 1, "F0 B0 F1 B1 F2 B2"),
        ("sequential", 0, "F0 B0 F1 B1 F2 B2"),
    ],
)
def test_the_passes_of_two_stages_and_three_micro_batches(schedule, stage, passes):
    tasks = SCHEDULES[schedule](stage, 2, 3)
    assert " ".join(f"{direction.name[0]}{index}" for direction, index in tasks) == passes


@given(st.sampled_from(sorted(SCHEDULES)), STAGES, MICRO_BATCHES)
def test_a_later_stage_never_holds_more_micro_batches_than_an_earlier_one(schedule, stages, m):
    held = [count_in_flight(schedule, stage, stages, m) for stage in range(stages)]
    assert held == sorted(held, reverse=True) and 1 <= held[-1] <= held[0] <= m
