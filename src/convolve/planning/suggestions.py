"""Changes that make a run fit in memory. Every suggestion is checked with the memory model."""

from collections.abc import Iterator
from dataclasses import replace

from convolve.config import Config
from convolve.planning.memory import Workload
from convolve.planning.step_time import Layout


def suggest_changes(config: Config, layout: Layout) -> Iterator[str]:
    """Yield single changes that make a run fit; if none is enough, changes together with recomputation."""
    if layout.fits:
        return
    recomputed = _recomputed(layout)
    if recomputed.fits:
        yield "--enable-recomputation: fits"
    single = list(_change(config, layout))
    yield from single
    if single or recomputed.fits:
        return
    together = [f"--enable-recomputation {line}" for line in _change(config, recomputed)]
    yield from together or ["no change that was tried is enough; use devices with more memory"]


def _change(config: Config, layout: Layout) -> Iterator[str]:
    for trial in (_reschedule, _shard, _shrink, _split):
        yield from trial(config, layout)


def largest_batch(layout: Layout) -> int:
    """Return the largest micro batch with which every stage fits; 0 if not even one sample does."""
    low, high = 0, 1
    while high <= 1 << 20 and _with_samples(layout, high).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _with_samples(layout, middle).fits else (low, middle)
    return low


def _with_samples(layout: Layout, samples: int) -> Layout:
    return _with_workload(layout, replace(layout.memory_model.workload, samples=samples))


def _with_workload(layout: Layout, workload: Workload) -> Layout:
    return replace(layout, memory_model=replace(layout.memory_model, workload=workload))


def _recomputed(layout: Layout) -> Layout:
    checkpoints = frozenset(work.block.name for work in layout.works)
    return _with_workload(layout, replace(layout.memory_model.workload, checkpoints=checkpoints))


def _reschedule(config: Config, layout: Layout) -> Iterator[str]:
    if layout.schedule == "grouped" and replace(layout, schedule="interleaved").fits:
        yield "--pipeline-schedule interleaved: fits"


def _shard(config: Config, layout: Layout) -> Iterator[str]:
    state = replace(layout.memory_model.state, sharers=config.parallel.replicas)
    if not config.parallel.rts and replace(layout, memory_model=replace(layout.memory_model, state=state)).fits:
        yield "--rts: fits"


def _shrink(config: Config, layout: Layout) -> Iterator[str]:
    samples, count = largest_batch(layout), config.optim.gradient_accumulation_count
    if 0 < samples < config.optim.batch_size:
        more = -(-config.optim.batch_size * count // samples)
        yield f"--batch-size {samples}: fits; --gradient-accumulation-count {more} keeps the global batch near"


def _split(config: Config, layout: Layout) -> Iterator[str]:
    now, most = len(layout.stage_starts), sum(work.block.split_point for work in layout.works)
    for stages in range(now, min(most, 2 * now + 16) + 1):
        other = replace(layout, schedule=config.parallel.pipeline_schedule).rebalanced(stages)
        if other.fits:
            yield f"--shards {stages} --pipeline-splits {' '.join(other.splits)}: fits"
            return
