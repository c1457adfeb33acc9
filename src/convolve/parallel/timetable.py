"""What each pipeline stage does when: the timetable of one step.

A stage works through a fixed list of forward (F) and backward (B) passes, one after the other. With S stages and M
micro batches, stage s of

    grouped       does all F, then all B                                    (GPipe)        and holds M micro batches
    interleaved   does S - s times F, then B and F in turn, then what is left   (1F1B)     and holds min(M, S - s)
    sequential    does F and B of one micro batch before it takes the next                 and holds 1

F of a micro batch waits for F of the stage before, B for B of the stage after, each with the time that the message
takes; a wire carries one message after the other. What is left of the time is the bubble; where all passes cost the
same and messages cost nothing it is (S - 1) / (M + S - 1) for the first two, and 1 - 1 / S for the third.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


def settle_schedule(asked: str, stages: int, micro_batches: int) -> str:
    """The schedule that a step follows: a single stage takes one micro batch after the other, and with fewer micro
    batches than stages there is no turn to take."""
    if stages == 1:
        return "sequential"
    return "grouped" if asked == "interleaved" and micro_batches < stages else asked


class Pass(Enum):
    """The two directions."""

    FORWARD = "forward"
    BACKWARD = "backward"


Task = tuple[Pass, int]
"""A pass of one micro batch."""


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro batch in one stage, and of the message to the next stage or back from it."""

    forward: float
    backward: float
    message: float = 0.0


@dataclass(frozen=True)
class Box:
    """One pass in the timetable; times are seconds from the beginning of the step."""

    stage: int
    micro_batch: int
    direction: Pass
    begin: float
    end: float


@dataclass(frozen=True)
class Timetable:
    """All passes of one step."""

    boxes: tuple[Box, ...]
    stages: int
    micro_batches: int

    @property
    def seconds(self) -> float:
        """From the first pass to the end of the last one."""
        return max(box.end for box in self.boxes)

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they wait."""
        busy = sum(box.end - box.begin for box in self.boxes)
        return 1 - busy / (self.stages * self.seconds) if self.seconds else 0.0

    def last_backward(self, stage: int) -> Box:
        """The pass after which the gradients of a stage are complete."""
        own = (box for box in self.boxes if box.stage == stage and box.direction is Pass.BACKWARD)
        return max(own, key=lambda box: box.end)


def list_grouped(stage: int, stages: int, micro_batches: int) -> list[Task]:
    """All forward passes, then all backward passes."""
    return [(direction, index) for direction in Pass for index in range(micro_batches)]


def list_interleaved(stage: int, stages: int, micro_batches: int) -> list[Task]:
    """As many forward passes as there are stages from here on; then each backward pass makes room for the next."""
    ahead = min(micro_batches, stages - stage)
    tasks: list[Task] = [(Pass.FORWARD, index) for index in range(ahead)]
    for index in range(micro_batches):
        tasks.append((Pass.BACKWARD, index))
        if ahead + index < micro_batches:
            tasks.append((Pass.FORWARD, ahead + index))
    return tasks


def list_sequential(stage: int, stages: int, micro_batches: int) -> list[Task]:
    """Both passes of a micro batch before the next one enters."""
    return [(direction, index) for index in range(micro_batches) for direction in Pass]


SCHEDULES: dict[str, Callable[[int, int, int], list[Task]]] = {
    "grouped": list_grouped,
    "interleaved": list_interleaved,
    "sequential": list_sequential,
}


def count_held(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """The most micro batches whose activations a stage holds at a time."""
    held = most = 0
    for direction, _ in SCHEDULES[schedule](stage, stages, micro_batches):
        held += 1 if direction is Pass.FORWARD else -1
        most = max(most, held)
    return most


def ideal_bubble(schedule: str, stages: int, micro_batches: int) -> float:
    """The bubble of stages that all cost the same, with free messages."""
    if schedule == "sequential":
        return 1 - 1 / stages
    return (stages - 1) / (micro_batches + stages - 1)


def draw_up(schedule: str, times: Sequence[StageTime], micro_batches: int) -> Timetable:
    """The timetable of one step: every pass begins as soon as its stage is free and its input is there."""
    stages = len(times)
    waiting = [SCHEDULES[schedule](stage, stages, micro_batches)[::-1] for stage in range(stages)]
    boxes, free, post = list[Box](), [0.0] * stages, _Post(times)
    while any(waiting):
        for stage, tasks in enumerate(waiting):
            while tasks and (ready := post.arrival(stage, tasks[-1])) is not None:
                direction, index = tasks.pop()
                begin = max(free[stage], ready)
                spent = times[stage].forward if direction is Pass.FORWARD else times[stage].backward
                free[stage] = begin + spent
                boxes.append(Box(stage, index, direction, begin, free[stage]))
                post.send(boxes[-1])
    return Timetable(tuple(boxes), stages, micro_batches)


class _Post:
    """Messages between stages; each wire carries one after the other, in each direction."""

    def __init__(self, times: Sequence[StageTime]) -> None:
        self._times = times
        self._arrived: dict[tuple[int, Pass, int], float] = {}
        self._free: dict[tuple[int, Pass], float] = {}

    def arrival(self, stage: int, task: Task) -> float | None:
        """When the input of a pass is there; None while nobody has made it."""
        if stage == 0 and task[0] is Pass.FORWARD:
            return 0.0
        return self._arrived.get((stage, *task))

    def send(self, box: Box) -> None:
        """Hand the result of a pass to whoever waits for it."""
        forward = box.direction is Pass.FORWARD
        target = box.stage + (1 if forward else -1)
        if target == len(self._times):
            self._arrived[box.stage, Pass.BACKWARD, box.micro_batch] = box.end
        elif target >= 0:
            wire = (min(box.stage, target), box.direction)
            moment = max(box.end, self._free.get(wire, 0.0)) + self._times[wire[0]].message
            self._free[wire] = self._arrived[target, box.direction, box.micro_batch] = moment
