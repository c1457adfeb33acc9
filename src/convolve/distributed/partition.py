"""Split a model into pipeline stages: named or automatic split points, and the part of this process.

A pipeline is as fast as its slowest stage, so the best split makes the most expensive stage as cheap as possible.
Stages are contiguous, so the optimum is quick to find. With best(k, j) the lowest possible cost of the most expensive
of k stages over the first j blocks,

    best(1, j) = cost(0, j)        best(k, j) = min over i of max(best(k - 1, i), cost(i, j))

where cost(i, j) is the sum over blocks i to j - 1, and infinite if these blocks do not fit in a stage's memory.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from torch import Tensor

from convolve.compat.names import canonical_checkpoints, canonical_splits
from convolve.config import Config
from convolve.config.training import AUTO_SPLITS
from convolve.distributed import optimizer_sharding
from convolve.distributed.batch_norm_span import BatchNormSpan, NoSpan, build_span
from convolve.distributed.collectives import Collectives, require_equal_weights
from convolve.distributed.optimizer_sharding import NoSharding, OptimizerSharding
from convolve.distributed.pipeline import Pipeline
from convolve.errors import ConfigError, suggest
from convolve.layers.batch_norm import BatchNorm2d, StepStatistics
from convolve.models.adopt import AdoptedModel
from convolve.models.network import Network, Shape, match_blocks, recompute, subnetwork
from convolve.models.summary import summarize
from convolve.models.timing import time_blocks
from convolve.numerics.select import apply_kernels

PROFILE_SECONDS = 1.0
FitsFn = Callable[[int, int, int], bool]
"""Returns whether stage number `stage` can hold the blocks from `start` to `end` - 1."""


@dataclass(frozen=True)
class LocalShard:
    """The tensors of a run that this process holds: not those of blocks of other stages, nor state that others own."""

    remote_blocks: tuple[str, ...] = ()
    sharding: OptimizerSharding | NoSharding = field(default_factory=NoSharding)

    @property
    def is_sharded(self) -> bool:
        """True if replicas hold different optimizer state."""
        return isinstance(self.sharding, OptimizerSharding)

    def select(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the blocks of this stage."""
        return {name: tensor for name, tensor in tensors.items() if self.holds(name)}

    def select_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer state of the parameters that this process updates."""
        return {name: tensor for name, tensor in tensors.items() if self.holds_state(name)}

    def holds(self, name: str) -> bool:
        """Return whether a tensor belongs to a block of this stage."""
        return not name.startswith(tuple(f"{block.replace('/', '.')}." for block in self.remote_blocks))

    def holds_state(self, name: str) -> bool:
        """Return whether this process updates the parameter of an optimizer's tensor."""
        return self.sharding.owns(name.rpartition(".")[0])


@dataclass(frozen=True)
class Partition:
    """The part of a model in one process, and its connections to the other stages and to its batch-norm span."""

    part: Network
    shard: LocalShard
    pipeline: Pipeline | None
    span: BatchNormSpan | NoSpan


def balance_stages(costs: Sequence[float], stages: int, fits: FitsFn | None = None) -> list[int]:
    """Return the indices at which stages start, the first always 0, with the cheapest most expensive stage.

    Among equally good splits, the one with the earliest last stages is returned. Every stage has at least one block.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise ConfigError(f"--shards {stages}: the model has {blocks} blocks; choose 1 to {blocks}")
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] if fits is None or fits(stage, start, end) else inf

    best = [inf, *(cost(0, 0, end) for end in range(1, blocks + 1))]
    choices: list[list[int]] = []
    for stage in range(1, stages):
        rows = [(inf, 0)] * (stage + 1) + [
            min((max(best[start], cost(stage, start, end)), start) for start in range(stage, end))
            for end in range(stage + 1, blocks + 1)
        ]
        best, choice = (list(column) for column in zip(*rows, strict=True))
        choices.append(choice)
    if best[blocks] == inf:
        raise ConfigError(
            f"--shards {stages}: no split of the {blocks} blocks fits in memory; use more stages, a smaller batch, or "
            "recomputation"
        )
    starts, end = list[int](), blocks
    for choice in reversed(choices):
        end = choice[end]
        starts.append(end)
    return [0, *reversed(starts)]


def partition_model(model: Network, config: Config, collectives: Collectives) -> Partition:
    """Return this process's part of a model that every process has built whole, with the same weights."""
    require_equal_weights(collectives, model)
    parallel = config.parallel
    part, remote_blocks, shapes = model, tuple[str, ...](), None
    if collectives.topology.stages > 1:
        stages = group_blocks(model, choose_splits(model, config, collectives))
        _check_stages(model, stages)
        local = stages[collectives.topology.stage]
        shapes = _stage_shapes(model, local)
        part = subnetwork(model, local, shapes[0])
        remote_blocks = tuple(name for name in model.blocks if name not in local)
    span = build_span(collectives, parallel.bn_span)
    if span.size > 1:
        # Must be last: a synced batch norm blocks on its peers in every forward pass.
        _sync_batch_norms(model, part, span)
    if parallel.enable_recomputation:
        points = canonical_checkpoints(parallel.recompute_checkpoints, tuple(model.blocks))
        patterns = [one for one in points if _applies_here(part, model, one)]
        recompute(part, patterns)
    sharding = optimizer_sharding.build(collectives, part) if parallel.rts else NoSharding()
    pipeline = Pipeline(part, shapes, collectives, parallel.pipeline_schedule) if shapes else None
    return Partition(part, LocalShard(remote_blocks, sharding), pipeline, span)


def resolve_splits(model: Network, config: Config) -> tuple[str, ...] | None:
    """Check the splits of a config, and return the first blocks of the stages after the first, or None if automatic.

    Names of other systems are accepted. A model on the meta device is enough.
    """
    names, stages = list(model.blocks), config.parallel.shards
    splits = canonical_splits(config.parallel.pipeline_splits, names)
    allowed = model.split_points[1:]
    if stages > 1 and isinstance(model, AdoptedModel) and not model.is_chain:
        raise ConfigError(
            f"--shards {stages}: {config.model.model} is no chain of blocks; only nn.Sequential and modules that apply "
            "their children one after the other can be split; use --replicas"
        )
    if stages > len(allowed) + 1:
        raise ConfigError(
            f"--shards {stages}: {config.model.model} can be split into at most {len(allowed) + 1} stages; use fewer"
        )
    if splits == AUTO_SPLITS:
        return None
    unknown = next((name for name in splits if name not in allowed), None)
    if unknown is not None:
        problem = f"--pipeline-splits {unknown}: no stage can start there; {suggest(unknown, allowed)}"
    elif len(splits) != stages - 1:
        problem = (
            f"--pipeline-splits {' '.join(splits)}: --shards {stages} needs {stages - 1} splits, one for each stage "
            "after the first; name as many, or use --pipeline-splits auto"
        )
    else:
        ordered = tuple(sorted(splits, key=names.index))
        _check_stages(model, group_blocks(model, ordered))
        return ordered
    raise ConfigError(problem, tabulate_blocks(model, config.model.model))


def choose_splits(model: Network, config: Config, collectives: Collectives) -> tuple[str, ...]:
    """Return the first blocks of the stages after the first: as named, or balanced by times measured on rank 0."""
    splits = resolve_splits(model, config)
    if splits is not None:
        return splits
    names, measured = list(model.blocks), ""
    if collectives.is_rank_zero:
        copy = deepcopy(model)
        apply_kernels(config, copy)
        times = time_blocks(copy, config.optim.batch_size, PROFILE_SECONDS).blocks
        costs, allowed = [time.forward + time.backward for time in times], set(model.split_points)
        starts = balance_stages(costs, config.parallel.shards, lambda stage, start, end: names[start] in allowed)
        measured = json.dumps([names[start] for start in starts[1:]])
    return tuple(json.loads(collectives.broadcast_str(measured)))


def group_blocks(model: Network, splits: Sequence[str]) -> list[list[str]]:
    """Return the names of the blocks of each stage."""
    stages: list[list[str]] = [[]]
    for name in model.blocks:
        if name in splits:
            stages.append([])
        stages[-1].append(name)
    return stages


def tabulate_blocks(model: Network, name: str) -> str:
    """Return a table of blocks: parameters, multiply-adds, and activations of one sample."""
    rows = summarize(name, model).rows
    width = max(len(row.name) for row in rows)
    lines = [f"  {'block':{width}}  {'parameters':>12}  {'multiply-adds':>14}  {'activations':>12}"]
    for row in rows:
        activations = f"{row.activation_bytes / 1024:,.0f} KiB"
        lines.append(f"  {row.name:{width}}  {row.parameters:>12,}  {row.multiply_adds:>14,}  {activations:>12}")
    return "\n".join(lines)


def _check_stages(model: Network, stages: list[list[str]]) -> None:
    """Reject a stage without trainable parameters: gradients could not flow through it."""
    blocks = model.blocks
    for number, names in enumerate(stages):
        if not any(parameter.requires_grad for name in names for parameter in blocks[name].parameters()):
            raise ConfigError(
                f"stage {number + 1} of {len(stages)} ({names[0]} to {names[-1]}) has no trainable parameter; "
                "move a split or use fewer --shards"
            )


def _stage_shapes(model: Network, local: list[str]) -> tuple[Shape, Shape]:
    """Return the shape of one sample before and after the blocks of a stage."""
    rows = summarize("", model).rows
    names = [row.name for row in rows]
    first, last = names.index(local[0]), names.index(local[-1])
    return rows[first - 1].shape if first else model.input_shape, rows[last].shape


def _sync_batch_norms(model: Network, part: Network, span: BatchNormSpan | NoSpan) -> None:
    if not any(isinstance(module, BatchNorm2d) for module in model.modules()):
        raise ConfigError(
            f"--bn-span {span.size}: the model has no batch norm; remove the option or set --norm-type batch"
        )
    for name, module in part.named_modules():
        if isinstance(module, BatchNorm2d):
            module.sync(span)
        elif isinstance(module, StepStatistics):
            kind = type(module).__name__
            raise ConfigError(
                f"--bn-span {span.size}: {name} is a {kind}; only nn.BatchNorm2d can be synced; remove the option"
            )


def _applies_here(part: Network, model: Network, pattern: str) -> bool:
    """Return whether a pattern matches a block here, or none of the whole model, which is an error later."""
    return bool(match_blocks(part.blocks, [pattern]) or not match_blocks(model.blocks, [pattern]))
