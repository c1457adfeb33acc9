"""The order of the passes of each stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convolve.distributed.pipeline import SCHEDULES, Pass, count_in_flight, effective_schedule

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
    assert held == {"grouped": m, "interleaved": min(m, stages - stage), "sequential": 1}


@pytest.mark.parametrize("requested", sorted(SCHEDULES))
def test_one_stage_is_sequential_and_too_few_micro_batches_are_grouped(requested):
    assert effective_schedule(requested, 1, 8) == "sequential"
    assert effective_schedule(requested, 4, 4) == requested
    assert effective_schedule(requested, 4, 3) == ("grouped" if requested == "interleaved" else requested)
