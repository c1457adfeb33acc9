"""Simulated schedules keep the order of passes and have the bubble of the formula."""

from xml.etree import ElementTree

import pytest

from convolve.distributed.pipeline import SCHEDULES, Pass, count_in_flight, ideal_bubble
from convolve.planning.pipeline_sim import StageTime, draw_schedule, simulate

EVEN = StageTime(1.0, 2.0)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (2, 8), (4, 4), (4, 16), (5, 3)])
def test_even_stages_have_the_bubble_of_theory(schedule, stages, micro_batches):
    table = simulate(schedule, [EVEN] * stages, micro_batches)
    assert table.bubble == pytest.approx(ideal_bubble(schedule, stages, micro_batches))
    assert len(table.passes) == 2 * stages * micro_batches


def test_the_two_overlapping_schedules_take_the_same_time():
    assert simulate("grouped", [EVEN] * 4, 8).seconds == simulate("interleaved", [EVEN] * 4, 8).seconds


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_no_pass_starts_before_its_input_arrives_or_while_its_stage_is_busy(schedule):
    times = [StageTime(1.0, 2.5, 0.25), StageTime(2.0, 3.0, 0.5), StageTime(0.5, 1.0)]
    table = simulate(schedule, times, 5)
    done = {(box.stage, box.direction, box.micro_batch): box for box in table.passes}
    for box in table.passes:
        if box.direction is Pass.FORWARD and box.stage > 0:
            before = done[box.stage - 1, Pass.FORWARD, box.micro_batch]
            assert box.start >= before.end + times[box.stage - 1].message
        if box.direction is Pass.BACKWARD and box.stage < 2:
            after = done[box.stage + 1, Pass.BACKWARD, box.micro_batch]
            assert box.start >= after.end + times[box.stage].message
        if box.direction is Pass.BACKWARD:
            assert box.start >= done[box.stage, Pass.FORWARD, box.micro_batch].end
    for stage in range(3):
        own = sorted((box.start, box.end) for box in table.passes if box.stage == stage)
        assert all(first[1] <= second[0] for first, second in zip(own, own[1:], strict=False))


@pytest.mark.parametrize(
    ("schedule", "held"),
    [("gpipe", [8, 8, 8, 8]), ("grouped", [7, 5, 3, 1]), ("interleaved", [4, 3, 2, 1]), ("sequential", [1, 1, 1, 1])],
)
def test_a_stage_holds_the_micro_batches_of_its_schedule(schedule, held):
    assert [count_in_flight(schedule, stage, 4, 8) for stage in range(4)] == held


def test_a_pipeline_is_as_fast_as_its_slowest_stage():
    slow = simulate("interleaved", [StageTime(1, 2), StageTime(2, 4)], 50)
    assert slow.seconds == pytest.approx(50 * 6, rel=0.02)


def test_the_last_backward_pass_completes_the_gradients_of_a_stage():
    table = simulate("grouped", [EVEN] * 2, 3)
    assert table.last_backward(0).end == table.seconds
    assert table.last_backward(1).end == table.seconds - EVEN.backward


def test_a_drawing_has_a_box_for_every_pass_within_its_frame():
    table = simulate("interleaved", [EVEN] * 3, 4)
    root = ElementTree.fromstring(draw_schedule(table, "a & b"))
    boxes = [item for item in root.iter() if item.tag.endswith("rect") and len(item)]
    assert len(boxes) == len(table.passes)
    assert max(float(box.get("x")) + float(box.get("width")) for box in boxes) <= float(root.get("width"))
    assert {box.get("class") for box in boxes} == {"forward", "backward"}
