"""Time of a step, with communication, and the layout of a model over stages.

    step                 of the slowest stage: last backward pass, all-reduces that it does not hide, update
    message              latency + bytes / bandwidth
    all-reduce over N    ring: 2 (N - 1) messages of bytes / N each, one after the other, on every link:
                         2 (N - 1) latency + 2 (N - 1) / N bytes / bandwidth

The gradients of a stage are ready block by block, last block first, during its last backward pass. Buckets are sent in
that order, one after the other.
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
        """Return the seconds of one message."""
        return self.latency + size / self.bandwidth

    def all_reduce_seconds(self, size: float, members: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes in a ring."""
        return 2 * (members - 1) * self.message(size / members)


# Activations and gradients are sent in fp32 in every number format.
ACTIVATION_BYTES = 4
# Defaults: shared memory within a host, 10 Gbit/s Ethernet between hosts.
MEMORY = Link(20e-6, 4e9)
ETHERNET = Link(50e-6, 1.25e9)


def ring_bytes(size: float, members: int) -> float:
    """Return the bytes that each member of a ring sends for an all-reduce of `size` bytes."""
    return 2 * (members - 1) / members * size


def finish_all_reduces(ready: Iterable[tuple[float, float]], link: Link, members: int) -> float:
    """Return when the last all-reduce ends, from the ready time and bytes of each, in the order of sending."""
    clock = 0.0
    for moment, size in ready:
        clock = max(clock, moment) + (link.all_reduce_seconds(size, members) if members > 1 else 0.0)
    return clock


@dataclass(frozen=True)
class StageWork:
    """One block: its memory cost and the seconds of a micro batch in it."""

    block: BlockCost
    forward: float
    backward: float


@dataclass(frozen=True)
class Layout:
    """The blocks of a model over stages; `stage_starts` are the indices of the first blocks."""

    works: tuple[StageWork, ...]
    stage_starts: tuple[int, ...]
    schedule: str
    micro_batches: int
    memory_model: MemoryModel

    @cached_property
    def stages(self) -> tuple[tuple[StageWork, ...], ...]:
        ends = (*self.stage_starts[1:], len(self.works))
        return tuple(self.works[start:end] for start, end in zip(self.stage_starts, ends, strict=True))

    @property
    def splits(self) -> tuple[str, ...]:
        """First blocks of the stages after the first."""
        return tuple(self.works[start].block.name for start in self.stage_starts[1:])

    def in_flight(self, stage: int, stages: int | None = None) -> int:
        """Return the maximum number of micro batches whose activations a stage holds."""
        return count_in_flight(self.schedule, stage, stages or len(self.stage_starts), self.micro_batches)

    def memory(self, stage: int) -> StageMemory:
        return self.memory_model.need([work.block for work in self.stages[stage]], self.in_flight(stage))

    @property
    def fits(self) -> bool:
        """True if every stage fits in the memory of a device."""
        return all(self.memory(stage).total <= self.memory_model.limit for stage in range(len(self.stage_starts)))

    def simulate(self, link: Link) -> PipelineSchedule:
        """Return the schedule of one step, with the messages between stages."""
        samples = self.memory_model.workload.samples
        following = (*self.stages[1:], ())
        times = [
            StageTime(
                sum(work.forward for work in stage),
                sum(work.backward for work in stage),
                link.message(ACTIVATION_BYTES * samples * after[0].block.input_values) if after else 0.0,
            )
            for stage, after in zip(self.stages, following, strict=True)
        ]
        return simulate(self.schedule, times, self.micro_batches)

    def split_at(self, names: Sequence[str]) -> "Layout":
        """Return the same model with stages that start at these blocks."""
        index = {work.block.name: number for number, work in enumerate(self.works)}
        return replace(self, stage_starts=(0, *(index[name] for name in names)))

    def rebalanced(self, stages: int) -> "Layout":
        """Return the same model in so many stages, the slowest as fast as possible among all splits that fit.

        If no split fits, memory is ignored, and `fits` is False.
        """
        costs = [work.forward + work.backward for work in self.works]
        in_flight = [self.in_flight(stage, stages) for stage in range(stages)]

        def may_start(stage: int, start: int, end: int) -> bool:
            return self.works[start].block.split_point

        def fits(stage: int, start: int, end: int) -> bool:
            blocks = [work.block for work in self.works[start:end]]
            return may_start(stage, start, end) and self.memory_model.fits(blocks, in_flight[stage])

        try:
            starts = balance_stages(costs, stages, fits)
        except ConfigError:
            starts = balance_stages(costs, stages, may_start)
        return replace(self, stage_starts=tuple(starts))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: pipeline with its messages, all-reduces that nothing hides, and the update."""

    passes: float
    exposed: float
    update: float

    @property
    def total(self) -> float:
        return self.passes + self.exposed + self.update


@dataclass(frozen=True)
class Replication:
    """Replicas of a pipeline that sum their gradients, and the seconds of an update per trained weight."""

    replicas: int
    link: Link
    update_seconds: float
    gradient_bytes: int


def predict_step(layout: Layout, schedule: PipelineSchedule, replication: Replication) -> StepTime:
    """Return the time of one step."""
    passes = schedule.seconds
    summed = updated = passes
    for index, stage in enumerate(layout.stages):
        start = schedule.last_backward(index).start
        ready = [(start + moment, size) for moment, size in ready_buckets(stage, replication.gradient_bytes)]
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
