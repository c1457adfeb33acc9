"""Cutting a network into the stages of a pipeline, and giving this process its part.

Where to cut a list of blocks into pipeline stages.

A pipeline is as fast as its slowest stage, so the best cut makes the costliest stage as cheap as it can be. Stages are
contiguous, and so the exact answer is quick: with best(k, j) the least possible cost of the costliest of k stages over
the first j blocks,

    best(1, j) = cost(0, j)        best(k, j) = min over i of max(best(k - 1, i), cost(i, j))

where cost(i, j) adds up blocks i to j - 1, and is infinite where these blocks do not fit into a stage's memory.

What a training run is at one moment: weights, optimizer state, two integers, and the loss scale.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from torch import Tensor

from convolve.compat.names import canonical_splits
from convolve.config import Config
from convolve.config.training import AUTO_SPLITS
from convolve.distributed import optimizer_sharding
from convolve.distributed.collectives import Collectives, require_equal_weights, span_sum
from convolve.distributed.optimizer_sharding import NoSharding, OptimizerSharding
from convolve.distributed.pipeline import Pipeline
from convolve.errors import ConfigError, suggest
from convolve.layers.batch_norm import BatchNorm2d
from convolve.models.network import Network, Shape
from convolve.models.summary import summarize
from convolve.models.timing import time_blocks
from convolve.numerics.select import use_kernels


@dataclass(frozen=True)
class LocalShard:
    """Which tensors of a run this process holds: not those of blocks at other stages, nor state that others own."""

    elsewhere: tuple[str, ...] = ()
    ownership: OptimizerSharding | NoSharding = field(default_factory=NoSharding)

    @property
    def shared_out(self) -> bool:
        """Whether replicas hold different optimizer state."""
        return isinstance(self.ownership, OptimizerSharding)

    def keep(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that belong to the blocks here."""
        prefixes = tuple(f"{name.replace('/', '.')}." for name in self.elsewhere)
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}

    def keep_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The optimizer state of the parameters that this process updates."""
        return {name: tensor for name, tensor in tensors.items() if self.ownership.owns(name.rpartition(".")[0])}


FitsFn = Callable[[int, int, int], bool]
"""Whether stage number `s` can hold the blocks from `begin` up to, not including, `end`."""


def balance_stages(costs: Sequence[float], stages: int, fits: FitsFn | None = None) -> list[int]:
    """Indices at which stages begin, the first always 0, so that the costliest stage is as cheap as possible.

    Among equally good cuts the one with the earliest last stages is taken. Every stage has at least one block.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise ConfigError(f"{stages} stages for {blocks} blocks: every stage needs a block; ask for 1 to {blocks}")
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] if fits is None or fits(stage, begin, end) else inf

    best = [inf, *(cost(0, 0, end) for end in range(1, blocks + 1))]
    choices: list[list[int]] = []
    for stage in range(1, stages):
        rows = [(inf, 0)] * (stage + 1) + [
            min((max(best[begin], cost(stage, begin, end)), begin) for begin in range(stage, end))
            for end in range(stage + 1, blocks + 1)
        ]
        best, choice = (list(column) for column in zip(*rows, strict=True))
        choices.append(choice)
    if best[blocks] == inf:
        raise ConfigError(
            f"{stages} stages for {blocks} blocks: no cut fits into the memory; take more stages, a smaller batch, or "
            "recomputation"
        )
    return _backtrack(choices, blocks)


def _backtrack(choices: Sequence[Sequence[int]], blocks: int) -> list[int]:
    begins, end = list[int](), blocks
    for row in reversed(choices):
        end = row[end]
        begins.append(end)
    return [0, *reversed(begins)]


PROFILE_SECONDS = 1.0


@dataclass(frozen=True)
class Partition:
    """What one process of a training holds: its part of the network, and how it is joined to the others."""

    part: Network
    holdings: LocalShard
    pipeline: Pipeline | None


def partition_model(network: Network, config: Config, collectives: Collectives) -> Partition:
    """This process's part of a network that every process has built whole, with the same weights."""
    require_equal_weights(collectives, network)
    parallel = config.parallel
    part, elsewhere, shapes = network, tuple[str, ...](), None
    if collectives.topology.stages > 1:
        stages = group_blocks(network, choose_splits(network, config, collectives))
        _check_stages(network, stages)
        own = stages[collectives.topology.stage]
        shapes = _stage_shapes(network, own)
        part = network.part(own, shapes[0])
        elsewhere = tuple(name for name in network.blocks if name not in own)
    if parallel.bn_span > 1:
        # Last, since a norm that is joined waits for the others whenever it runs.
        _sync_batch_norms(network, part, parallel.bn_span, collectives)
    if parallel.enable_recomputation:
        part.recompute([pattern for pattern in parallel.recompute_checkpoints if _applies_here(part, network, pattern)])
    ownership = optimizer_sharding.build(collectives, part) if parallel.rts else NoSharding()
    pipeline = Pipeline(part, shapes, collectives, parallel.pipeline_schedule) if shapes else None
    return Partition(part, LocalShard(elsewhere, ownership), pipeline)


def check_splits(network: Network, config: Config) -> None:
    """Stages must be able to begin where the config says; a sketch of the network is enough to know."""
    names, stages = list(network.blocks), config.parallel.shards
    splits = canonical_splits(config.parallel.pipeline_splits, names)
    seams = network.seams[1:]
    if stages > len(seams) + 1:
        raise ConfigError(
            f"shards={stages}: {config.model.model} can be cut into {len(seams) + 1} parts; ask for fewer stages"
        )
    if splits == AUTO_SPLITS:
        return
    wrong = next((name for name in splits if name not in seams), None)
    if wrong is not None:
        problem = f"pipeline-splits={wrong}: no stage can begin there; {suggest(wrong, seams)}"
    elif len(splits) != stages - 1:
        problem = (
            f"pipeline-splits names {len(splits)} blocks, but shards={stages} needs {stages - 1}, one for each stage "
            "after the first; name as many, or let --pipeline-splits auto choose"
        )
    else:
        _check_stages(network, group_blocks(network, list(splits)))
        return
    raise ConfigError(problem, tabulate_blocks(network, config.model.model))


def choose_splits(network: Network, config: Config, collectives: Collectives) -> list[str]:
    """The blocks at which stages begin, the first stage left out: as named, or balanced by times measured here."""
    names, stages = list(network.blocks), config.parallel.shards
    splits = canonical_splits(config.parallel.pipeline_splits, names)
    if splits != AUTO_SPLITS:
        return sorted(splits, key=names.index)
    chosen = ""
    if collectives.is_rank_zero:
        copy = deepcopy(network)
        use_kernels(config, copy)
        times = time_blocks(copy, config.optim.batch_size, PROFILE_SECONDS).blocks
        costs, seams = [time.forward + time.backward for time in times], set(network.seams)
        begins = balance_stages(costs, stages, lambda stage, begin, end: names[begin] in seams)
        chosen = json.dumps([names[begin] for begin in begins[1:]])
    return list(json.loads(collectives.broadcast_str(chosen)))


def group_blocks(network: Network, splits: list[str]) -> list[list[str]]:
    """The names of the blocks of each stage."""
    stages: list[list[str]] = [[]]
    for name in network.blocks:
        if name in splits:
            stages.append([])
        stages[-1].append(name)
    return stages


def tabulate_blocks(network: Network, name: str) -> str:
    """The blocks of a network with parameters, multiply-adds and activations of one sample, a line each."""
    rows = summarize(name, network).rows
    width = max(len(row.name) for row in rows)
    lines = [f"  {'block':{width}}  {'parameters':>12}  {'multiply-adds':>14}  {'activations':>12}"]
    for row in rows:
        kept = f"{row.activation_bytes / 1024:,.0f} KiB"
        lines.append(f"  {row.name:{width}}  {row.parameters:>12,}  {row.multiply_adds:>14,}  {kept:>12}")
    return "\n".join(lines)


def _check_stages(network: Network, stages: list[list[str]]) -> None:
    """Gradients flow only through stages that learn."""
    blocks = network.blocks
    for number, names in enumerate(stages):
        if not any(one.requires_grad for name in names for one in blocks[name].parameters()):
            raise ConfigError(
                f"stage {number + 1} of {len(stages)} ({names[0]} to {names[-1]}) has no parameter to train; "
                "move a split, or take fewer --shards"
            )


def _stage_shapes(network: Network, own: list[str]) -> tuple[Shape, Shape]:
    """The shape of one sample before and after some of the blocks."""
    rows = summarize("", network).rows
    names = [row.name for row in rows]
    first, last = names.index(own[0]), names.index(own[-1])
    return rows[first - 1].shape if first else network.input_shape, rows[last].shape


def _sync_batch_norms(network: Network, part: Network, span: int, collectives: Collectives) -> None:
    if not any(isinstance(module, BatchNorm2d) for module in network.modules()):
        raise ConfigError(f"bn-span={span}: the network has no batch norm; leave it out, or set --norm-type batch")
    add = span_sum(collectives.topology, span)
    for module in part.modules():
        if isinstance(module, BatchNorm2d):
            module.join(span, add)


def _applies_here(part: Network, network: Network, pattern: str) -> bool:
    """Whether a pattern is for this part; one that fits no block of the whole network is kept, and refused later."""
    return part.has_block(pattern) or not network.has_block(pattern)
