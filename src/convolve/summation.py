"""One fixed tree in which the micro batches of a step are summed.

Floating-point sums have the same bits in every layout only if every layout evaluates the same tree. Its leaves are the
micro batches of a step, over all replicas, numbered from 0 to n - 1. A node (first leaf, 2^k leaves) is

    node(i, 2^k) = node(i, 2^(k-1)) + node(i + 2^(k-1), 2^(k-1))

and a right side beyond the last leaf is omitted: no zero is added for it. Up to three leaves this is a sum from left
to right.

A process that adds leaves i to j - 1 ends with the few nodes that cover them, and nodes of several processes are added
in the same way. With consecutive leaves it has about 2 log2(n) at most, and one if it has 2^k from a multiple of 2^k.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A subtree: its first leaf, and the number of leaves that it has in a complete tree, a power of two."""

    first: int
    size: int


class TreeSum(Generic[T]):
    """Adds the leaves of a tree, or nodes of it, in order of their first leaf.

    `add(left, right, first)` returns the sum of two values and may overwrite the left one; `first` is the first leaf of
    the right one.
    """

    def __init__(self, leaves: int, add: Callable[[T, T, int], T]) -> None:
        self._leaves = leaves
        self._complete = 1 << (leaves - 1).bit_length()
        self._add = add
        self.nodes: list[Node] = []
        self.values: list[T] = []

    def push(self, node: Node, value: T) -> None:
        """Add a node, then every parent that is complete."""
        self.nodes.append(node)
        self.values.append(value)
        while self._grow() or self._join():
            pass

    def _grow(self) -> bool:
        """Replace the last node by its parent if it is all of it: there is no right side."""
        first, size = self.nodes[-1]
        if first + size < self._leaves or size == self._complete or first % (2 * size):
            return False
        self.nodes[-1] = Node(first, 2 * size)
        return True

    def _join(self) -> bool:
        """Replace the last two nodes by their parent if they are its sides."""
        if len(self.nodes) < 2:
            return False
        left, right = self.nodes[-2:]
        if left.size != right.size or left.first % (2 * left.size) or right.first != left.first + left.size:
            return False
        value = self.values.pop()
        self.values[-1] = self._add(self.values[-1], value, right.first)
        self.nodes[-2:] = [Node(left.first, 2 * left.size)]
        return True


def cover(leaves: range, count: int) -> list[Node]:
    """Return the nodes in which the sum of consecutive leaves ends, in a tree of `count` leaves."""
    tree = TreeSum[None](count, lambda left, right, first: None)
    for leaf in leaves:
        tree.push(Node(leaf, 1), None)
    return tree.nodes


class Leaf(NamedTuple):
    """A leaf of the tree of a step, and how many leaves that has."""

    number: int
    leaves: int


_current: Leaf | None = None


@contextmanager
def at(leaf: Leaf) -> Iterator[None]:
    """Mark the micro batch that is processed inside the block, for sums that a layer collects."""
    global _current
    before, _current = _current, leaf
    try:
        yield
    finally:
        _current = before


def current_leaf() -> Leaf | None:
    """Return the micro batch that is processed now; None outside of a training step."""
    return _current
