"""Batch-norm sums over the members of a span: neighboring replicas that normalize their micro batches as one.

Micro batches of a step are numbered, and a span joins numbers k s to k s + s - 1, each on another replica. The last
span of a short step has fewer members. All ranks know the number of micro batches, so they agree on the members without
a message, and a replica without a micro batch is not waited for.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from convolve.distributed.collectives import Collectives, new_group, ordered_sum
from convolve.distributed.positions import Positions


class NoSpan:
    """Every replica normalizes its micro batches alone."""

    size = 1
    members = 1

    def select(self, number: int, count: int) -> None: ...

    def __call__(self, values: Tensor) -> Tensor:
        return values


class BatchNormSpan:
    """Sums a tensor over the replicas that run a micro batch of the selected span."""

    def __init__(self, size: int, group: dist.ProcessGroup, positions: Positions) -> None:
        self.size = size
        self.members = size
        self._group = group
        self._positions = positions

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchNormSpan":
        """Return itself: a copied model has the same peers."""
        return self

    def select(self, number: int, count: int) -> None:
        """Select the span of a micro batch, given its number and how many micro batches the step has."""
        self.members = min(self.size, count - number // self.size * self.size)

    def __call__(self, values: Tensor) -> Tensor:
        """Return the sum over the members, added in the order of their micro batches."""
        if self.members == 1:
            return values
        with self._positions.during("batch-norm sum of a span"):
            if self.members == self.size:
                return ordered_sum(values, self._group)
            return self._sum_over_first(values.contiguous())

    def _sum_over_first(self, values: Tensor) -> Tensor:
        """Sum over the first members of the group: a collective would wait for the others, too."""
        rank = self._group.rank()
        parts = [torch.empty_like(values) for _ in range(self.members)]
        parts[rank] = values.clone()
        others = [member for member in range(self.members) if member != rank]
        transfers = [dist.P2POp(dist.isend, values, group=self._group, group_peer=other) for other in others]
        transfers += [dist.P2POp(dist.irecv, parts[other], group=self._group, group_peer=other) for other in others]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        for part in parts[1:]:
            parts[0] += part
        return parts[0]


def build_span(collectives: Collectives, size: int) -> BatchNormSpan | NoSpan:
    """Return the span of this replica among groups of `size` neighbors. All ranks must call this."""
    topology = collectives.topology
    if topology.world == 1 or size == 1:
        return NoSpan()
    members = [topology.same_stage(stage) for stage in range(topology.stages)]
    spans = [ranks[first : first + size] for ranks in members for first in range(0, len(ranks), size)]
    return BatchNormSpan(size, new_group(spans, topology.rank), collectives.positions)
