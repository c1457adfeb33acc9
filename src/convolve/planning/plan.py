"""`convolve plan`: estimate memory, pipeline schedule and speed of a run without the hardware."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convolve import device
from convolve.config import Config
from convolve.config.loading import published_device
from convolve.distributed.partition import resolve_splits
from convolve.distributed.pipeline import effective_schedule, ideal_bubble
from convolve.engine.build import build_on_meta
from convolve.engine.loop import run_samples
from convolve.errors import ConfigError
from convolve.files import write_file
from convolve.layers.batch_norm import StepStatistics
from convolve.models.network import Network
from convolve.numerics.formats import DEVICE_MODELS
from convolve.planning.communication import Messages, list_messages
from convolve.planning.costs import (
    FLOAT32_BYTES,
    Costs,
    calculate_costs,
    list_blocks,
    measure_costs,
    state_bytes,
    workload,
)
from convolve.planning.memory import BlockCost, MemoryModel, StageMemory
from convolve.planning.pipeline_sim import PipelineSchedule, draw_schedule
from convolve.planning.step_time import (
    ETHERNET,
    MEMORY,
    Layout,
    Link,
    Replication,
    StageWork,
    StepTime,
    predict_step,
    ring_bytes,
)
from convolve.planning.suggestions import largest_batch, suggest_changes
from convolve.runs.describe import ScheduleCurve, count_samples, trace


@dataclass(frozen=True)
class Hardware:
    """Hardware of a plan; the default of each value is that of this machine or of the device model."""

    hosts: int = 1
    cores: int | None = None
    device_flops: float | None = None
    device_memory: int | None = None
    latency: float | None = None
    bandwidth: float | None = None

    def link(self) -> Link:
        """Return the link between processes; default: shared memory within a host, Ethernet between hosts."""
        default = MEMORY if self.hosts == 1 else ETHERNET
        return Link(
            default.latency if self.latency is None else self.latency,
            default.bandwidth if self.bandwidth is None else self.bandwidth,
        )

    def share_cores(self, devices: int) -> tuple[int, float]:
        """Return the threads of each CPU process, and the number of processes on each core."""
        cores = self.cores or device.available_threads()
        processes = -(-devices // self.hosts)
        return max(1, cores // processes), max(1.0, processes / cores)


@dataclass(frozen=True)
class RunLength:
    """Length of a run."""

    samples_per_epoch: int
    steps_per_epoch: int
    steps: int


@dataclass(frozen=True)
class StagePlan:
    """One stage: its blocks, their costs, the micro batches in flight, and the messages of a step."""

    first_block: str
    last_block: str
    blocks: int
    parameters: int
    multiply_adds: int
    forward_ms: float
    backward_ms: float
    held_micro_batches: int
    memory: StageMemory
    memory_bytes: int
    messages: tuple[Messages, ...]


@dataclass(frozen=True)
class PipelineEstimate:
    """The pipeline of one replica: its schedule and the bubble, for equal stages and as simulated."""

    schedule: str
    splits: tuple[str, ...]
    bubble_ideal: float
    bubble: float


@dataclass(frozen=True)
class MemoryFit:
    """Memory of one device, whether every stage fits in it, and what to change if not."""

    device_bytes: int
    source: str
    fits: bool
    largest_batch_size: int
    advice: tuple[str, ...]


@dataclass(frozen=True)
class CommEstimate:
    """Bytes that one device sums over replicas in a step, bytes it sends for that in a ring, and the link."""

    summed_bytes: int
    sent_bytes: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class SpeedEstimate:
    """Predicted times; `exposed_ms` are all-reduces that no computation hides."""

    passes_ms: float
    exposed_ms: float
    update_ms: float
    step_ms: float
    images_per_second: float
    epoch_seconds: float
    run_seconds: float
    source: str


@dataclass(frozen=True)
class Plan:
    """Estimates of a run."""

    name: str
    model: str
    devices: int
    hosts: int
    replicas: int
    micro_batches: int
    batch_size: int
    global_batch_size: int
    length: RunLength
    curve: ScheduleCurve
    precision: str
    stages: tuple[StagePlan, ...]
    passes: PipelineEstimate
    room: MemoryFit
    traffic: CommEstimate
    speed: SpeedEstimate


def plan(config: Config, hardware: Hardware) -> tuple[Plan, PipelineSchedule]:
    """Estimate a run on this hardware, and simulate the pipeline schedule of one step."""
    meta_model = build_on_meta(config)
    splits, blocks = resolve_splits(meta_model, config), list_blocks(config)
    norms = sum(isinstance(module, StepStatistics) for module in meta_model.modules())
    devices = config.parallel.processes
    limit, source = _find_memory(config, hardware, devices)
    costs = _find_costs(config, hardware, meta_model, blocks)
    layout = _choose_layout(config, splits, blocks, costs, limit)
    schedule = layout.simulate(hardware.link())
    traffic = _count_traffic(config, hardware, layout)
    weight_bytes = layout.memory_model.state.weight_bytes
    messages = list_messages(config, meta_model, layout.splits)
    step = predict_step(
        layout, schedule, Replication(config.parallel.replicas, hardware.link(), costs.update, FLOAT32_BYTES)
    )
    length = _measure_length(config)
    plan = Plan(
        name=config.name,
        model=config.model.model,
        devices=devices,
        hosts=hardware.hosts,
        replicas=config.parallel.replicas,
        micro_batches=config.optim.gradient_accumulation_count,
        batch_size=config.optim.batch_size,
        global_batch_size=config.global_batch_size,
        length=length,
        curve=trace(config),
        precision=f"{8 * layout.memory_model.state.compute_bytes}.{8 * weight_bytes}",
        stages=tuple(_describe_stage(layout, index, sent) for index, sent in enumerate(messages)),
        passes=_describe_passes(layout, schedule),
        room=MemoryFit(limit, source, layout.fits, largest_batch(layout), tuple(suggest_changes(config, layout))),
        traffic=traffic,
        speed=_estimate_speed(
            step, _norm_seconds(config, hardware, norms), (config.global_batch_size, length), costs.source
        ),
    )
    return plan, schedule


def _measure_length(config: Config) -> RunLength:
    """Return the length in steps. A step never crosses the end of an epoch, so its last step may be short."""
    per_epoch, batch = count_samples(config), config.global_batch_size
    epochs, rest = divmod(run_samples(config, per_epoch), per_epoch)
    steps_per_epoch = -(-per_epoch // batch)
    return RunLength(per_epoch, steps_per_epoch, epochs * steps_per_epoch + -(-rest // batch))


def _find_memory(config: Config, hardware: Hardware, devices: int) -> tuple[int, str]:
    if hardware.device_memory is not None:
        return hardware.device_memory, "as given"
    model = config.precision.device_model
    if model is not None:
        return DEVICE_MODELS[model].memory_bytes, model
    published = published_device(config.name)
    if published is not None:
        return DEVICE_MODELS[published].memory_bytes, f"{published}, for which the config was published"
    processes = -(-devices // hardware.hosts)
    source = f"this machine's, shared by {processes}" if processes > 1 else "this machine's"
    return device.memory_bytes() // processes, source


def _find_costs(config: Config, hardware: Hardware, meta_model: Network, blocks: Sequence[BlockCost]) -> Costs:
    if hardware.device_flops is not None:
        return calculate_costs(config, blocks, hardware.device_flops)
    threads, per_core = hardware.share_cores(config.parallel.processes)
    return measure_costs(config, meta_model, threads).scaled(per_core)


def _choose_layout(
    config: Config, splits: Sequence[str] | None, blocks: Sequence[BlockCost], costs: Costs, limit: int
) -> Layout:
    """Return the stages of a config. Recomputation adds a forward pass to every backward pass."""
    parallel, count = config.parallel, config.optim.gradient_accumulation_count
    recomputed = int(parallel.enable_recomputation)
    works = tuple(
        StageWork(block, time.forward, time.backward + recomputed * time.forward)
        for block, time in zip(blocks, costs.blocks, strict=True)
    )
    memory_model = MemoryModel(state_bytes(config), workload(config, blocks), limit)
    layout = Layout(
        works, (0,), effective_schedule(parallel.pipeline_schedule, parallel.shards, count), count, memory_model
    )
    return layout.rebalanced(parallel.shards) if splits is None else layout.split_at(splits)


def _describe_stage(layout: Layout, index: int, messages: Sequence[Messages]) -> StagePlan:
    works, memory = layout.stages[index], layout.memory(index)
    return StagePlan(
        first_block=works[0].block.name,
        last_block=works[-1].block.name,
        blocks=len(works),
        parameters=sum(work.block.parameters for work in works),
        multiply_adds=sum(work.block.multiply_adds for work in works),
        forward_ms=1000 * sum(work.forward for work in works),
        backward_ms=1000 * sum(work.backward for work in works),
        held_micro_batches=layout.in_flight(index),
        memory=memory,
        memory_bytes=memory.total,
        messages=tuple(messages),
    )


def _describe_passes(layout: Layout, schedule: PipelineSchedule) -> PipelineEstimate:
    ideal = ideal_bubble(layout.schedule, len(layout.stages), layout.micro_batches)
    return PipelineEstimate(layout.schedule, layout.splits, ideal, schedule.bubble)


def _count_traffic(config: Config, hardware: Hardware, layout: Layout) -> CommEstimate:
    summed = FLOAT32_BYTES * max(sum(work.block.trained for work in stage) for stage in layout.stages)
    link = hardware.link()
    return CommEstimate(summed, round(ring_bytes(summed, config.parallel.replicas)), link.latency, link.bandwidth)


def _norm_seconds(config: Config, hardware: Hardware, norms: int) -> float:
    """Return the seconds that batch norms over several replicas wait for each other, twice per micro batch."""
    span, micro_batches = config.parallel.bn_span, config.optim.gradient_accumulation_count
    return 2 * norms * micro_batches * hardware.link().all_reduce_seconds(0, span)


def _estimate_speed(step: StepTime, norms: float, size: tuple[int, RunLength], source: str) -> SpeedEstimate:
    batch, length = size
    seconds = step.total + norms
    return SpeedEstimate(
        passes_ms=1000 * (step.passes + norms),
        exposed_ms=1000 * step.exposed,
        update_ms=1000 * step.update,
        step_ms=1000 * seconds,
        images_per_second=batch / seconds if seconds else float("inf"),
        epoch_seconds=seconds * length.steps_per_epoch,
        run_seconds=seconds * length.steps,
        source=source,
    )


def write_schedule(plan: Plan, schedule: PipelineSchedule, path: Path) -> None:
    """Write an SVG of the passes of one step."""
    title = f"{plan.name}: {plan.passes.schedule}"
    write_file(path, draw_schedule(schedule, title).encode(), ConfigError)
