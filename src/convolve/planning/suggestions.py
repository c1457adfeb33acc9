"""What to change in a training that does not fit into its devices. Every line was tried on paper."""

from collections.abc import Iterator
from dataclasses import replace

from convolve.config import Config
from convolve.planning.memory import Workload
from convolve.planning.step_time import Layout


def suggest_changes(config: Config, layout: Layout) -> Iterator[str]:
    """Nothing for a training that fits; else single changes that are enough, else changes beside recomputation."""
    if layout.fits:
        return
    recomputed = _recomputed(layout)
    if recomputed.fits:
        yield "--enable-recomputation: fits"
    alone = list(_change(config, layout))
    yield from alone
    if alone or recomputed.fits:
        return
    together = [f"--enable-recomputation {line}" for line in _change(config, recomputed)]
    yield from together or ["no change that was tried is enough; such a training needs larger devices"]


def _change(config: Config, layout: Layout) -> Iterator[str]:
    for trial in (_reschedule, _shard, _shrink, _split):
        yield from trial(config, layout)


def largest_batch(layout: Layout) -> int:
    """The most samples in a micro batch with which every stage fits; 0 if not even one does."""
    low, high = 0, 1
    while high <= 1 << 20 and _with_samples(layout, high).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _with_samples(layout, middle).fits else (low, middle)
    return low


def _with_samples(layout: Layout, samples: int) -> Layout:
    return _with_load(layout, replace(layout.budget.load, samples=samples))


def _with_load(layout: Layout, load: Workload) -> Layout:
    return replace(layout, budget=replace(layout.budget, load=load))


def _recomputed(layout: Layout) -> Layout:
    kept = frozenset(work.block.name for work in layout.works)
    return _with_load(layout, replace(layout.budget.load, kept=kept))


def _reschedule(config: Config, layout: Layout) -> Iterator[str]:
    if layout.schedule == "grouped" and replace(layout, schedule="interleaved").fits:
        yield "--pipeline-schedule interleaved: fits"


def _shard(config: Config, layout: Layout) -> Iterator[str]:
    storage = replace(layout.budget.storage, sharers=config.parallel.replicas)
    if not config.parallel.rts and replace(layout, budget=replace(layout.budget, storage=storage)).fits:
        yield "--rts: fits"


def _shrink(config: Config, layout: Layout) -> Iterator[str]:
    samples, count = largest_batch(layout), config.optim.gradient_accumulation_count
    if 0 < samples < config.optim.batch_size:
        more = -(-config.optim.batch_size * count // samples)
        yield f"--batch-size {samples}: fits; --gradient-accumulation-count {more} keeps the global batch near"


def _split(config: Config, layout: Layout) -> Iterator[str]:
    now = len(layout.begins)
    for stages in range(now, min(len(layout.works), 2 * now + 16) + 1):
        other = replace(layout, schedule=config.parallel.pipeline_schedule).rebalanced(stages)
        if other.fits:
            yield f"--shards {stages} --pipeline-splits {' '.join(other.splits)}: fits"
            return
