"""Where a computation is: which layer, forward or backward, and which operation in it.

Forward, hooks on the modules say so. Backward, the graph does: every node has the number that it got when its operation
ran, and the numbers at which layers began are known. Both hold when a part of the network is computed again inside the
backward pass.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

ACCUMULATION = 2**64 - 1
OUTSIDE = ""


class Place(NamedTuple):
    """A layer and a direction; the network as a whole is the layer "", and outside of it is no place."""

    layer: str
    backward: bool

    def __str__(self) -> str:
        return f"{self.layer or 'network'} {'backward' if self.backward else 'forward'}"


class Places:
    """Follows a network through its passes."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._names: list[str | None] = []
        self._counts: Counter[Place] = Counter()
        self.active = False

    def attach(self, network: nn.Module) -> None:
        """Put hooks on all modules inside a network; they do nothing while nobody looks."""
        for name, module in network.named_modules():
            if module is not network:
                layer = name.replace(".", "/")
                module.register_forward_pre_hook(self._enter_hook(layer))
                module.register_forward_hook(self._leave_hook(), always_call=True)

    def begin(self) -> None:
        """A micro batch begins."""
        self._stack, self._starts, self._names = [], [], []
        self._counts = Counter()

    def enter(self, layer: str) -> None:
        """What comes now belongs to a layer."""
        self._stack.append(layer)
        self._counts[Place(layer, False)] = 0
        self._mark()

    def leave(self) -> None:
        """The layer is done; what comes now belongs to the one around it."""
        if self._stack:
            self._stack.pop()
            self._mark()

    def now(self) -> Place | None:
        """Where the operation that is being run belongs; None: outside of the network."""
        if self._stack:
            return Place(self._stack[-1], False)
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        index = bisect_right(self._starts, node._sequence_nr()) - 1
        layer = self._names[index] if index >= 0 else None
        return None if layer is None else Place(layer, True)

    def number(self, place: Place) -> int:
        """The number of this operation at its place: the same in every repetition of the pass."""
        self._counts[place] += 1
        return self._counts[place]

    @staticmethod
    def accumulating() -> bool:
        """Whether a gradient is being added to a parameter's."""
        node = torch._C._current_autograd_node()
        return node is not None and node._sequence_nr() == ACCUMULATION

    def _mark(self) -> None:
        self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._names.append(self._stack[-1] if self._stack else None)

    def _enter_hook(self, layer: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self.active:
                self.enter(layer)

        return hook

    def _leave_hook(self) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.active:
                self.leave()

        return hook
