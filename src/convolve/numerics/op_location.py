"""Attribute operations to layers: in the forward pass by module hooks, in the backward pass by the autograd graph.

Autograd numbers every node when its operation runs. The tracker records the number at which each layer starts and ends,
so a node that runs backward maps to its layer. Both also work while a part of the model is recomputed inside the
backward pass.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

# The number of every node that accumulates the gradient of a parameter.
ACCUMULATE_GRAD = 2**64 - 1


class OpLocation(NamedTuple):
    """A layer and a direction; the layer "" is the model outside of its layers."""

    layer: str
    backward: bool

    @property
    def direction(self) -> str:
        return "backward" if self.backward else "forward"

    def __str__(self) -> str:
        return f"{self.layer or 'network'} {self.direction}"


@dataclass
class PassTrace:
    """Record of one micro batch: the open layers, the node number at which each starts, and operation counts."""

    stack: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    counts: Counter[OpLocation] = field(default_factory=Counter)


class OpTracker:
    """Locates the current operation in a model. A pipeline switches `trace` between its micro batches."""

    def __init__(self) -> None:
        self.trace = PassTrace()
        self.active = False
        self._parameters: dict[int, str] = {}

    def install(self, model: nn.Module) -> None:
        """Register hooks on all modules inside a model. They do nothing unless `active` is set."""
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, module in model.named_modules():
            if module is not model:
                module.register_forward_pre_hook(partial(self._on_enter, name.replace(".", "/")))
                module.register_forward_hook(self._on_leave, always_call=True)

    def enter(self, layer: str) -> None:
        """Attribute the operations that follow to a layer."""
        self.trace.stack.append(layer)
        self.trace.counts[OpLocation(layer, False)] = 0
        self._mark()

    def leave(self) -> None:
        """Attribute the operations that follow to the enclosing layer again."""
        if self.trace.stack:
            self.trace.stack.pop()
            self._mark()

    def current(self) -> OpLocation | None:
        """Return the location of the operation that is running, or None if it is outside of the model."""
        trace = self.trace
        if trace.stack:
            return OpLocation(trace.stack[-1], False)
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        index = bisect_right(trace.starts, node._sequence_nr()) - 1
        layer = trace.names[index] if index >= 0 else None
        return None if layer is None else OpLocation(layer, True)

    def next_index(self, location: OpLocation) -> int:
        """Count an operation and return its index at its location, the same in every repetition of the pass."""
        self.trace.counts[location] += 1
        return self.trace.counts[location]

    def accumulating_parameter(self) -> str | None:
        """Return the parameter whose gradient is being accumulated by the running operation, if any."""
        node: Any = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() != ACCUMULATE_GRAD:
            return None
        return self._parameters[id(node.variable)]

    def _mark(self) -> None:
        trace = self.trace
        trace.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        trace.names.append(trace.stack[-1] if trace.stack else None)

    def _on_enter(self, layer: str, module: nn.Module, args: Any) -> None:
        if self.active:
            self.enter(layer)

    def _on_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.active:
            self.leave()
