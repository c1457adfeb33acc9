"""How much memory one stage needs.

For a stage with P parameters, of which T are trained, at b bytes per weight and c bytes per computed value:

    weights       b P; c P more where computation takes a copy in a narrower format, b T for a running average
    gradients     b T
    optimizer     b T for each first moment, 4 T for each second moment (16 bits cannot hold one), divided by the
                  number of replicas where the state is sharded
    activations   what the backward pass needs of one micro batch, times the micro batches that the schedule holds

With recomputation a micro batch leaves only the inputs of the segments between checkpoints behind, and the largest
segment is there once in full, while it is computed again. The allocator's waste, kernels' work space and the program
itself are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockCost:
    """One block of the network: values per sample that enter it and that its backward pass needs; whether a stage may
    begin with it."""

    name: str
    parameters: int
    trained: int
    multiply_adds: int
    input_values: int
    kept_values: int
    seam: bool = True


@dataclass(frozen=True)
class StateBytes:
    """Bytes of each kind of value, and how many of them there are for each trained weight."""

    weight_bytes: int = 4
    compute_bytes: int = 4
    first_moments: int = 0
    second_moments: int = 0
    averages: int = 0
    sharers: int = 1


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one stage needs."""

    weights: int
    gradients: int
    optimiser: int  # a key of `--json` that was published in this spelling
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimiser + self.activations


@dataclass(frozen=True)
class Workload:
    """What passes through a stage: samples in a micro batch, and after which blocks recomputation keeps activations.

    `kept` is None without recomputation. The input of a stage is always kept.
    """

    samples: int
    kept: frozenset[str] | None = None

    def held_values(self, blocks: Sequence[BlockCost], micro_batches: int) -> int:
        """The most values that a stage keeps for its backward passes."""
        if self.kept is None:
            return self.samples * micro_batches * sum(block.kept_values for block in blocks)
        segments: list[list[BlockCost]] = [[]]
        for block in blocks:
            segments[-1].append(block)
            if block.name in self.kept and block is not blocks[-1]:
                segments.append([])
        inputs = sum(segment[0].input_values for segment in segments)
        largest = max(sum(block.kept_values for block in segment) for segment in segments)
        return self.samples * (micro_batches * inputs + largest)


@dataclass(frozen=True)
class MemoryModel:
    """The memory question: how values are stored, what passes through, and what one device has."""

    storage: StateBytes
    load: Workload
    limit: int

    def need(self, blocks: Sequence[BlockCost], micro_batches: int) -> StageMemory:
        """What a stage of these blocks needs while it holds so many micro batches."""
        store = self.storage
        parameters = sum(block.parameters for block in blocks)
        trained = sum(block.trained for block in blocks)
        copy = store.compute_bytes if store.compute_bytes < store.weight_bytes else 0
        slots = store.weight_bytes * store.first_moments + 4 * store.second_moments
        return StageMemory(
            weights=(store.weight_bytes + copy) * parameters + store.weight_bytes * store.averages * trained,
            gradients=store.weight_bytes * trained,
            optimiser=-(-slots * trained // store.sharers),
            activations=store.compute_bytes * self.load.held_values(blocks, micro_batches),
        )

    def fits(self, blocks: Sequence[BlockCost], micro_batches: int) -> bool:
        """Whether one device has room for such a stage."""
        return self.need(blocks, micro_batches).total <= self.limit
