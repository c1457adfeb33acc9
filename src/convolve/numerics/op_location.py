"""Where a computation is: which layer, forward or backward, and which operation in it.

Forward, hooks on the modules say so. Backward, the graph does: every node has the number that it got when its operation
ran, and the numbers at which layers began are known. Both hold when a part of the network is computed again inside the
backward pass.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

ACCUMULATION = 2**64 - 1
OUTSIDE = ""


class OpLocation(NamedTuple):
    """A layer and a direction; the network as a whole is the layer "", and outside of it is no place."""

    layer: str
    backward: bool

    def __str__(self) -> str:
        return f"{self.layer or 'network'} {'backward' if self.backward else 'forward'}"


@dataclass
class PassTrace:
    """What is known of one micro batch: the layers that it is in, where each began, and operations so far."""

    stack: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    counts: Counter[OpLocation] = field(default_factory=Counter)


class OpTracker:
    """Follows a network through its passes; the micro batches of a pipeline are followed side by side."""

    def __init__(self) -> None:
        self._track = PassTrace()
        self._parameters: dict[int, str] = {}
        self.active = False

    def attach(self, network: nn.Module) -> None:
        """Put hooks on all modules inside a network; they do nothing while nobody looks."""
        self._parameters = {id(parameter): name for name, parameter in network.named_parameters()}
        for name, module in network.named_modules():
            if module is not network:
                layer = name.replace(".", "/")
                module.register_forward_pre_hook(self._enter_hook(layer))
                module.register_forward_hook(self._leave_hook(), always_call=True)

    def follow(self, track: PassTrace) -> None:
        """What comes now belongs to this micro batch."""
        self._track = track

    def enter(self, layer: str) -> None:
        """What comes now belongs to a layer."""
        self._track.stack.append(layer)
        self._track.counts[OpLocation(layer, False)] = 0
        self._mark()

    def leave(self) -> None:
        """The layer is done; what comes now belongs to the one around it."""
        if self._track.stack:
            self._track.stack.pop()
            self._mark()

    def now(self) -> OpLocation | None:
        """Where the operation that is being run belongs; None: outside of the network."""
        track = self._track
        if track.stack:
            return OpLocation(track.stack[-1], False)
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        index = bisect_right(track.starts, node._sequence_nr()) - 1
        layer = track.names[index] if index >= 0 else None
        return None if layer is None else OpLocation(layer, True)

    def number(self, place: OpLocation) -> int:
        """The number of this operation at its place: the same in every repetition of the pass."""
        self._track.counts[place] += 1
        return self._track.counts[place]

    def accumulating(self) -> str | None:
        """The parameter to whose gradient another one is being added, if that is what happens."""
        node: Any = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() != ACCUMULATION:
            return None
        return self._parameters[id(node.variable)]

    def _mark(self) -> None:
        track = self._track
        track.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        track.names.append(track.stack[-1] if track.stack else None)

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
