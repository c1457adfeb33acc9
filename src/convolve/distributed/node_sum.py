"""Sums over the nodes that replicas contribute to the tree of a step (`convolve.summation`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import Tensor

from convolve.data.loader.loader import ReplicaShard
from convolve.summation import Node, TreeSum, cover

_MAX_COUNTS = 1024  # of micro batches in a step, to be tried one by one
AddFn = Callable[[Tensor, Tensor, int], Tensor]
"""Returns the sum of two flat tensors, given the first leaf of the second one; overwrites neither."""


@dataclass(frozen=True)
class SumLayout:
    """How the micro batches of a step, at most `accumulation` for each replica, are divided among replicas."""

    replicas: int = 1
    accumulation: int = 1
    span: int = 1
    micro_batch_size: int = 1

    def nodes(self, count: int) -> list[list[Node]]:
        """Return the nodes that each replica contributes to a step of `count` micro batches."""
        return _list_nodes(self.replicas, self.span, count)

    @cached_property
    def most_nodes(self) -> int:
        """The largest number of nodes of a replica in any step; above a thousand micro batches, a bound of it."""
        counts = range(1, self.replicas * self.accumulation + 1)
        if len(counts) > _MAX_COUNTS:
            return bound_nodes(self.accumulation)
        return max(len(nodes) for count in counts for nodes in self.nodes(count))

    def first_sample(self, leaf: int, count: int) -> int:
        """Return the position in the global batch of the first sample of a leaf."""
        order = sorted(range(count), key=lambda number: (number % self.span, number))
        return order[leaf] * self.micro_batch_size


@lru_cache(maxsize=1024)
def _list_nodes(replicas: int, span: int, count: int) -> list[list[Node]]:
    shards = [ReplicaShard(replica, replicas, span) for replica in range(replicas)]
    return [cover(shard.leaves(count), count) for shard in shards]


def bound_nodes(leaves: int) -> int:
    """Return the most nodes in which up to `leaves` consecutive leaves can end: sizes rise from 1 and fall again."""
    nodes = 0
    while leaves >= 1 << nodes // 2:
        leaves -= 1 << nodes // 2
        nodes += 1
    return nodes


def plain_add(left: Tensor, right: Tensor, first: int) -> Tensor:
    """Add without rounding to another format."""
    return left + right


def is_plain_pair(nodes: Sequence[Sequence[Node]], add: AddFn) -> bool:
    """Return whether two replicas have one node each: a single addition, which has no order."""
    return add is plain_add and [len(replica) for replica in nodes] == [1, 1]


def sum_nodes(values: Sequence[Sequence[Tensor]], nodes: Sequence[Sequence[Node]], add: AddFn) -> Tensor:
    """Return the sum of the nodes of all replicas; a replica may have more values than nodes."""
    leaves = max(first + size for replica in nodes for first, size in replica)
    pairs = [pair for replica in zip(nodes, values, strict=True) for pair in zip(*replica, strict=False)]
    tree = TreeSum[Tensor](leaves, add)
    for node, value in sorted(pairs, key=lambda pair: pair[0]):
        tree.push(node, value)
    (total,) = tree.values
    return total
