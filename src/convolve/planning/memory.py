"""Memory of one pipeline stage.

For a stage with P parameters, of which T are trained, at b bytes per weight and c bytes per computed value:

    weights       b P; c P more for a copy in a narrower format to compute with, b T for an average of the weights
    gradients     b T
    optimizer     b T for each first moment, 4 T for each second moment (16 bits cannot hold one), divided by the
                  number of replicas if the state is sharded
    activations   what the backward pass needs of one micro batch, times the micro batches in flight

With recomputation, only the inputs of the segments between checkpoints are kept for a micro batch, and the largest
segment exists once in full, while it is recomputed. Allocator overhead, kernel workspaces and the program itself are
not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockCost:
    """One block of a model, with values per sample: its input and what its backward pass needs.

    `split_point`: whether a stage may start with this block.
    """

    name: str
    parameters: int
    trained: int
    multiply_adds: int
    input_values: int
    kept_values: int
    split_point: bool = True


@dataclass(frozen=True)
class StateBytes:
    """Bytes of each kind of value, and the number of moments and averages of each trained weight."""

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
        return self.weights + self.gradients + self.optimiser + self.activations


@dataclass(frozen=True)
class Workload:
    """Samples in a micro batch, and the blocks after which recomputation keeps activations.

    `checkpoints` is None without recomputation. The input of a stage is always kept.
    """

    samples: int
    checkpoints: frozenset[str] | None = None

    def kept_values(self, blocks: Sequence[BlockCost], micro_batches: int) -> int:
        """Return the maximum number of values that a stage keeps for its backward passes."""
        if self.checkpoints is None:
            return self.samples * micro_batches * sum(block.kept_values for block in blocks)
        segments: list[list[BlockCost]] = [[]]
        for block in blocks:
            segments[-1].append(block)
            if block.name in self.checkpoints and block is not blocks[-1]:
                segments.append([])
        inputs = sum(segment[0].input_values for segment in segments)
        largest = max(sum(block.kept_values for block in segment) for segment in segments)
        return self.samples * (micro_batches * inputs + largest)


@dataclass(frozen=True)
class MemoryModel:
    """Memory of stages on a device with `limit` bytes."""

    state: StateBytes
    workload: Workload
    limit: int

    def need(self, blocks: Sequence[BlockCost], micro_batches: int) -> StageMemory:
        """Return the memory of a stage with these blocks and so many micro batches in flight."""
        state = self.state
        parameters = sum(block.parameters for block in blocks)
        trained = sum(block.trained for block in blocks)
        copy = state.compute_bytes if state.compute_bytes < state.weight_bytes else 0
        slots = state.weight_bytes * state.first_moments + 4 * state.second_moments
        return StageMemory(
            weights=(state.weight_bytes + copy) * parameters + state.weight_bytes * state.averages * trained,
            gradients=state.weight_bytes * trained,
            optimiser=-(-slots * trained // state.sharers),
            activations=state.compute_bytes * self.workload.kept_values(blocks, micro_batches),
        )

    def fits(self, blocks: Sequence[BlockCost], micro_batches: int) -> bool:
        return self.need(blocks, micro_batches).total <= self.limit
