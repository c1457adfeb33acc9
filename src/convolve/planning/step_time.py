"""A training that exists on paper: its stages, their memory, the timetable of a step, and the time that a step takes.

step := the slowest stage's  last backward pass, sums that it could not hide, update
sums    gradients travel over replicas in buckets, each as soon as the last backward pass has made it

What it costs to send: a stated model of the network between processes.

    message             latency + bytes / bandwidth
    sum over N, ring    2 (N - 1) messages of bytes / N each, one after the other, on every link:
                        2 (N - 1) latency + 2 (N - 1) / N bytes / bandwidth

The gradients of a stage are ready block by block, last block first, while its last backward pass runs; what is ready is
sent in that order, one after the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from convolve.distributed.gradient_sync import group_by_bytes
from convolve.distributed.partition import balance_stages
from convolve.distributed.pipeline import count_in_flight
from convolve.errors import ConfigError
from convolve.planning.memory import BlockCost, MemoryModel, StageMemory
from convolve.planning.pipeline_sim import PipelineSchedule, StageTime, simulate


@dataclass(frozen=True)
class Link:
    """Latency in seconds and bandwidth in bytes per second, in each direction."""

    latency: float
    bandwidth: float

    def message(self, size: float) -> float:
        """Seconds of one message."""
        return self.latency + size / self.bandwidth

    def ring(self, size: float, members: int) -> float:
        """Seconds to add up `size` bytes over the members of a ring."""
        return 2 * (members - 1) * self.message(size / members)


# Processes of one host share its memory; hosts are taken to have ten-gigabit Ethernet unless told otherwise.
MEMORY = Link(20e-6, 4e9)
ETHERNET = Link(50e-6, 1.25e9)


def ring_bytes(size: float, members: int) -> float:
    """What each member of a ring sends to add up `size` bytes."""
    return 2 * (members - 1) / members * size


def finish_all_reduces(ready: Iterable[tuple[float, float]], link: Link, members: int) -> float:
    """When the last of several sums is there, given when each is ready and its bytes, in the order of sending."""
    clock = 0.0
    for moment, size in ready:
        clock = max(clock, moment) + (link.ring(size, members) if members > 1 else 0.0)
    return clock


@dataclass(frozen=True)
class StageWork:
    """One block: what it costs in memory, and seconds of a micro batch in it."""

    block: BlockCost
    forward: float
    backward: float


@dataclass(frozen=True)
class Layout:
    """The blocks of a network, laid out over stages; `begins` are the indices at which stages begin."""

    works: tuple[StageWork, ...]
    begins: tuple[int, ...]
    schedule: str
    micro_batches: int
    budget: MemoryModel

    @cached_property
    def stages(self) -> tuple[tuple[StageWork, ...], ...]:
        """The blocks of each stage."""
        ends = (*self.begins[1:], len(self.works))
        return tuple(self.works[begin:end] for begin, end in zip(self.begins, ends, strict=True))

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the blocks at which the stages after the first begin."""
        return tuple(self.works[begin].block.name for begin in self.begins[1:])

    def held(self, stage: int, stages: int | None = None) -> int:
        """The most micro batches that a stage holds at a time."""
        return count_in_flight(self.schedule, stage, stages or len(self.begins), self.micro_batches)

    def memory(self, stage: int) -> StageMemory:
        """What a stage needs."""
        return self.budget.need([work.block for work in self.stages[stage]], self.held(stage))

    @property
    def fits(self) -> bool:
        """Whether every stage has room on its device."""
        return all(self.memory(stage).total <= self.budget.limit for stage in range(len(self.begins)))

    def timetable(self, link: Link) -> PipelineSchedule:
        """One step, with the messages between stages."""
        samples, width = self.budget.load.samples, self.budget.storage.compute_bytes
        following = (*self.stages[1:], ())
        times = [
            StageTime(
                sum(work.forward for work in stage),
                sum(work.backward for work in stage),
                link.message(samples * width * after[0].block.input_values) if after else 0.0,
            )
            for stage, after in zip(self.stages, following, strict=True)
        ]
        return simulate(self.schedule, times, self.micro_batches)

    def split_at(self, names: Sequence[str]) -> "Layout":
        """Return the same model with stages that start at these blocks."""
        index = {work.block.name: number for number, work in enumerate(self.works)}
        return replace(self, begins=(0, *(index[name] for name in names)))

    def rebalanced(self, stages: int) -> "Layout":
        """The same network in so many stages, the slowest as quick as can be among all cuts that fit.

        Where no cut fits, memory is left aside; `fits` tells.
        """
        costs = [work.forward + work.backward for work in self.works]
        held = [self.held(stage, stages) for stage in range(stages)]

        def begins_well(stage: int, begin: int, end: int) -> bool:
            return self.works[begin].block.seam

        def fits(stage: int, begin: int, end: int) -> bool:
            held_blocks = [work.block for work in self.works[begin:end]]
            return begins_well(stage, begin, end) and self.budget.fits(held_blocks, held[stage])

        try:
            begins = balance_stages(costs, stages, fits)
        except ConfigError:
            begins = balance_stages(costs, stages, begins_well)
        return replace(self, begins=tuple(begins))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: passes and messages of the pipeline, sums that nothing hides, and the update."""

    passes: float
    exposed: float
    update: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.passes + self.exposed + self.update


@dataclass(frozen=True)
class Replication:
    """Copies of a pipeline that add their gradients up, and what an update costs per trained weight."""

    replicas: int
    link: Link
    update_seconds: float
    gradient_bytes: int


def predict_step(layout: Layout, timetable: PipelineSchedule, replication: Replication) -> StepTime:
    """The time of one step."""
    passes = timetable.seconds
    summed = updated = passes
    for index, stage in enumerate(layout.stages):
        began = timetable.last_backward(index).begin
        ready = [(began + moment, size) for moment, size in ready_buckets(stage, replication.gradient_bytes)]
        done = finish_all_reduces(ready, replication.link, replication.replicas)
        trained = sum(work.block.trained for work in stage)
        summed = max(summed, done)
        updated = max(updated, done + replication.update_seconds * trained)
    return StepTime(passes, summed - passes, updated - summed)


def ready_buckets(stage: Sequence[StageWork], gradient_bytes: int) -> list[tuple[float, int]]:
    """Return when each bucket of gradients is complete, in seconds of the last backward pass, and its bytes.

    The last bucket is sent after the backward pass.
    """
    moments = list(accumulate(work.backward for work in reversed(stage)))
    blocks = [
        (moment, gradient_bytes * work.block.trained)
        for moment, work in zip(moments, reversed(stage), strict=True)
        if work.block.trained
    ]
    groups = group_by_bytes([size for _, size in blocks])
    ready = [(blocks[group[-1]][0], sum(blocks[index][1] for index in group)) for group in groups]
    return [*ready[:-1], *((moments[-1], size) for _, size in ready[-1:])]
