"""One stage of a pipeline, driven by the schedules of torch.distributed.pipelining.

The library wants a fixed number of micro batches of a fixed size. Here a window may end with a short micro batch, so
its micro batches are grouped by size, and each group runs through a schedule made for that size and number; schedules
are kept, since most windows are alike. Micro batches go through every stage in the same order, forward and backward, so
gradients are added up in the order of a single process.

What each pipeline stage does when: the timetable of one step.

A stage works through a fixed list of forward (F) and backward (B) passes, one after the other. With S stages and M
micro batches, stage s of

    grouped       does all F, then all B                                    (GPipe)        and holds M micro batches
    interleaved   does S - s times F, then B and F in turn, then what is left   (1F1B)     and holds min(M, S - s)
    sequential    does F and B of one micro batch before it takes the next                 and holds 1

F of a micro batch waits for F of the stage before, B for B of the stage after, each with the time that the message
takes; a wire carries one message after the other. What is left of the time is the bubble; where all passes cost the
same and messages cost nothing it is (S - 1) / (M + S - 1) for the first two, and 1 - 1 / S for the third.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from convolve.distributed.collectives import Collectives

if TYPE_CHECKING:
    from convolve.distributed.torch_pipeline import TorchPipeline


Shape = tuple[int, ...]
Forward = Callable[[int, Tensor], Tensor]
Around = Callable[[int, bool], AbstractContextManager[None]]
"""The context for the forward or (True) the backward pass of a micro batch, given by its number."""
MAX_CACHED_SCHEDULES = 8


class Pipeline:
    """This process's place in the pipeline of its replica; `shapes` are those of one sample, coming in and going out.

    The last stage gives one number, the loss, where the schedule has a backward pass.
    """

    def __init__(
        self,
        part: nn.Module,
        shapes: tuple[Shape, Shape],
        collectives: Collectives,
        schedule: str = "interleaved",
    ) -> None:
        assert collectives.stage_group is not None, "a pipeline has a process for each stage"
        self.stage, self.stages = collectives.topology.stage, collectives.topology.stages
        self._part = part
        self._shapes = shapes
        self._group = collectives.stage_group
        self._schedule = schedule
        self._lines: OrderedDict[tuple[int, int, bool], TorchPipeline] = OrderedDict()

    @property
    def last(self) -> bool:
        """Whether this stage gives the answers."""
        return self.stage == self.stages - 1

    def train(self, images: list[Tensor], forward: Forward, around: Around) -> None:
        """Forward and backward for the micro batches of a window, in groups of one size."""
        first = 0
        for size, count in self._groups([len(one) for one in images]):
            line = self._line(size, count, True)
            line.work.forward_of, line.stage.surroundings = forward, around
            line.run(torch.cat(images[first : first + count]) if self.stage == 0 else None, first)
            first += count

    def infer(self, images: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> Tensor | None:
        """Run a batch through all stages and return the logits at the last one, None at the others.

        `forward` runs the model of this stage; by default it is called directly.
        """
        line = self._line(len(images), 1, False)
        line.work.forward_of = lambda _, x: (forward or self._part)(x)
        return line.run(images if self.stage == 0 else None, 0)

    def _groups(self, sizes: list[int]) -> list[tuple[int, int]]:
        """Runs of micro batches of one size; each for itself where they follow one another."""
        groups: list[tuple[int, int]] = []
        for size in sizes:
            if groups and groups[-1][0] == size and self._schedule != "sequential":
                groups[-1] = (size, groups[-1][1] + 1)
            else:
                groups.append((size, 1))
        return groups

    def _line(self, size: int, count: int, learning: bool) -> "TorchPipeline":
        key = (size, count, learning)
        if key in self._lines:
            self._lines.move_to_end(key)
        else:
            self._lines[key] = self._build(size, count, learning)
            if len(self._lines) > MAX_CACHED_SCHEDULES:
                self._lines.popitem(last=False)
        return self._lines[key]

    def _build(self, size: int, count: int, learning: bool) -> "TorchPipeline":
        # Not before it is needed: the library behind it takes longer to load than most commands take in all.
        from convolve.distributed.torch_pipeline import MicroBatchGroup, build_pipeline_stage

        in_turn = learning and effective_schedule(self._schedule, self.stages, count) == "interleaved"
        lot = MicroBatchGroup(size, count, learning, in_turn)
        return build_pipeline_stage(self._part, self._shapes, (self.stage, self.stages), self._group, lot)


def effective_schedule(asked: str, stages: int, micro_batches: int) -> str:
    """The schedule that a step follows: a single stage takes one micro batch after the other, and with fewer micro
    batches than stages there is no turn to take."""
    if stages == 1:
        return "sequential"
    return "grouped" if asked == "interleaved" and micro_batches < stages else asked


class Pass(Enum):
    """The two directions."""

    FORWARD = "forward"
    BACKWARD = "backward"


ScheduledTask = tuple[Pass, int]


def list_grouped(stage: int, stages: int, micro_batches: int) -> list[ScheduledTask]:
    """All forward passes, then all backward passes."""
    return [(direction, index) for direction in Pass for index in range(micro_batches)]


def list_interleaved(stage: int, stages: int, micro_batches: int) -> list[ScheduledTask]:
    """As many forward passes as there are stages from here on; then each backward pass makes room for the next."""
    ahead = min(micro_batches, stages - stage)
    tasks: list[ScheduledTask] = [(Pass.FORWARD, index) for index in range(ahead)]
    for index in range(micro_batches):
        tasks.append((Pass.BACKWARD, index))
        if ahead + index < micro_batches:
            tasks.append((Pass.FORWARD, ahead + index))
    return tasks


def list_sequential(stage: int, stages: int, micro_batches: int) -> list[ScheduledTask]:
    """Both passes of a micro batch before the next one enters."""
    return [(direction, index) for index in range(micro_batches) for direction in Pass]


SCHEDULES: dict[str, Callable[[int, int, int], list[ScheduledTask]]] = {
    "grouped": list_grouped,
    "interleaved": list_interleaved,
    "sequential": list_sequential,
}


def count_in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
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
