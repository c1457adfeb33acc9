"""One stage of a pipeline, executed by torch.distributed.pipelining, and the order of its passes.

The library needs a fixed number of micro batches of one size. Here a step may end with a short micro batch, so micro
batches are grouped by size, and each group runs through a schedule built for that size and number. Schedules are
cached, since most steps are alike. Micro batches pass through every stage in the same order, forward and backward, so
gradients are summed in the order of a single process.

Each stage executes a fixed list of forward (F) and backward (B) passes. With S stages and M micro batches, stage s of

    grouped       executes 2 (S - s) - 1 times F, then B and F alternately      and holds min(M, 2 (S - s) - 1)
    interleaved   executes S - s times F, then B and F alternately    (1F1B)    and holds min(M, S - s)
    sequential    executes F and B of one micro batch, then the next            and holds 1
    gpipe         executes all F, then all B                                    and holds M

Grouped is Graphcore's schedule of that name: all stages execute F at the same time, then all execute B, so they are
balanced if F and B are, one by one. Interleaved starts a micro batch only when its activations fit. With fewer micro
batches than stages, both become gpipe. If all passes take the same time and messages take none, the bubble is
1 - 1 / S for sequential, and (S - 1) / (M + S - 1) for the others.
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
PassContextFn = Callable[[int, bool], AbstractContextManager[None]]
"""Returns the context of the forward or (True) the backward pass of a micro batch, given its number."""
MAX_CACHED_SCHEDULES = 8


class Pipeline:
    """The stage of this process in the pipeline of its replica; `shapes` are those of one sample, input and output.

    In training the output of the last stage is the loss.
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
        self._cache: OrderedDict[tuple[int, int, bool], TorchPipeline] = OrderedDict()

    @property
    def last(self) -> bool:
        """True if this stage computes the logits."""
        return self.stage == self.stages - 1

    def train(self, images: list[Tensor], forward: Forward, context: PassContextFn, *, lockstep: bool = False) -> None:
        """Run forward and backward passes of the micro batches of a step, in groups of one size.

        With `lockstep` every micro batch is a group, an order that does not depend on their number and sizes.
        """
        first = 0
        for size, count in self._groups([len(micro_batch) for micro_batch in images], lockstep):
            pipeline = self._cached(size, count, True)
            pipeline.module.forward_fn, pipeline.stage.context = forward, context
            pipeline.run(torch.cat(images[first : first + count]) if self.stage == 0 else None, first)
            first += count

    def infer(self, images: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> Tensor | None:
        """Run a batch through all stages and return the logits at the last one, None at the others.

        `forward` runs the model of this stage; by default it is called directly.
        """
        pipeline = self._cached(len(images), 1, False)
        pipeline.module.forward_fn = lambda _, x: (forward or self._part)(x)
        return pipeline.run(images if self.stage == 0 else None, 0)

    def _groups(self, sizes: list[int], lockstep: bool = False) -> list[tuple[int, int]]:
        """Return size and number of consecutive micro batches of one size; a sequential schedule has groups of one."""
        alone = lockstep or self._schedule == "sequential"
        groups: list[tuple[int, int]] = []
        for size in sizes:
            if groups and groups[-1][0] == size and not alone:
                groups[-1] = (size, groups[-1][1] + 1)
            else:
                groups.append((size, 1))
        return groups

    def _cached(self, size: int, count: int, training: bool) -> "TorchPipeline":
        key = (size, count, training)
        if key in self._cache:
            self._cache.move_to_end(key)
        else:
            self._cache[key] = self._build(size, count, training)
            if len(self._cache) > MAX_CACHED_SCHEDULES:
                self._cache.popitem(last=False)
        return self._cache[key]

    def _build(self, size: int, count: int, training: bool) -> "TorchPipeline":
        # Lazy: importing the library takes longer than most commands.
        from convolve.distributed.torch_pipeline import MicroBatchGroup, build_pipeline_stage

        schedule = effective_schedule(self._schedule, self.stages, count) if training else "gpipe"
        group = MicroBatchGroup(size, count, training, schedule)
        return build_pipeline_stage(self._part, self._shapes, (self.stage, self.stages), self._group, group)


def effective_schedule(requested: str, stages: int, micro_batches: int) -> str:
    """Return the schedule of a step: sequential for a single stage, gpipe with fewer micro batches than stages."""
    if stages == 1:
        return "sequential"
    return "gpipe" if requested != "sequential" and micro_batches < stages else requested


class Pass(Enum):
    """Direction of a pass."""

    FORWARD = "forward"
    BACKWARD = "backward"


ScheduledTask = tuple[Pass, int]


def list_gpipe(stage: int, stages: int, micro_batches: int) -> list[ScheduledTask]:
    """Return all forward passes, then all backward passes."""
    return [(direction, index) for direction in Pass for index in range(micro_batches)]


def list_grouped(stage: int, stages: int, micro_batches: int) -> list[ScheduledTask]:
    """Return forward passes until the first backward pass can arrive in lockstep, then both alternately."""
    return _alternate(2 * (stages - stage) - 1, micro_batches)


def list_interleaved(stage: int, stages: int, micro_batches: int) -> list[ScheduledTask]:
    """Return a forward pass for this and each later stage, then backward and forward passes alternately."""
    return _alternate(stages - stage, micro_batches)


def _alternate(ahead: int, micro_batches: int) -> list[ScheduledTask]:
    ahead = min(micro_batches, ahead)
    tasks: list[ScheduledTask] = [(Pass.FORWARD, index) for index in range(ahead)]
    for index in range(micro_batches):
        tasks.append((Pass.BACKWARD, index))
        if ahead + index < micro_batches:
            tasks.append((Pass.FORWARD, ahead + index))
    return tasks


def list_sequential(stage: int, stages: int, micro_batches: int) -> list[ScheduledTask]:
    """Return both passes of each micro batch before those of the next."""
    return [(direction, index) for index in range(micro_batches) for direction in Pass]


SCHEDULES: dict[str, Callable[[int, int, int], list[ScheduledTask]]] = {
    "gpipe": list_gpipe,
    "grouped": list_grouped,
    "interleaved": list_interleaved,
    "sequential": list_sequential,
}


def count_in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Return the maximum number of micro batches whose activations a stage holds."""
    held = maximum = 0
    for direction, _ in SCHEDULES[schedule](stage, stages, micro_batches):
        held += 1 if direction is Pass.FORWARD else -1
        maximum = max(maximum, held)
    return maximum


def ideal_bubble(schedule: str, stages: int, micro_batches: int) -> float:
    """Return the bubble if all passes take the same time and messages take none."""
    if schedule == "sequential":
        return 1 - 1 / stages
    return (stages - 1) / (micro_batches + stages - 1)
