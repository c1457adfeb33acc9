"""Emulation of a 16-bit device in fp32: every operation runs in fp32, and its result is rounded to the 16-bit grid.

    y = round16(op(x1, x2, ...))     with x1, x2, ... on the grid

This is what hardware computes that multiplies 16-bit numbers and accumulates in fp32: the inputs of each operation are
on the grid, and its output is rounded once. It happens below autograd, so backward operations are treated like forward
ones. Between 16 bits and fp32 there are casts, written as identities that round on one side:

    round_forward    forward: round    backward: pass     into the model, and out of a layer that stays in fp32
    round_backward   forward: pass     backward: round    out of the model, and into a layer that stays in fp32
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from convolve.layers.hooks import in_bookkeeping
from convolve.numerics.formats import FP32
from convolve.numerics.half_accumulation import Convolution, multiply, multiply_add
from convolve.numerics.op_location import OpLocation, OpTracker
from convolve.numerics.op_table import ListColor, RoundingRule, base_name, is_floating, is_norm, rounding_rule
from convolve.numerics.policy import Policy
from convolve.numerics.rounding import Flags, Grid, round_, rounded
from convolve.rng import hash_key

_FP32_GRID = Grid(FP32)
_BAD = int(Flags.OVERFLOW | Flags.NAN | Flags.INFINITY)


@dataclass(frozen=True)
class OverflowEvent:
    """An operation whose result left its format, with inputs and results."""

    location: OpLocation
    operation: str
    flags: Flags
    inputs: tuple[Any, ...]
    results: tuple[Tensor, ...]


class Observer(Protocol):
    """Interface of an observer of emulated values."""

    def on_step_start(self, step: int) -> None:
        """Prepare for the passes of a training step."""

    def on_step_end(self) -> None:
        """Finish a training step. Passes until the next one are evaluation."""

    def observes_results(self) -> bool:
        """Return whether `on_result` and `on_rounded` are to be called now."""

    def on_result(self, location: OpLocation, operation: str, result: Tensor) -> None:
        """Receive a result before it is rounded."""

    def on_rounded(self, location: OpLocation, operation: str, result: Tensor) -> None:
        """Receive a result after it was rounded, as the next operation reads it."""

    def on_overflow(self, event: OverflowEvent) -> None:
        """Receive a result that left its format."""


class NullObserver:
    """Observes nothing; the base class of observers that override some of the methods."""

    def on_step_start(self, step: int) -> None:
        pass

    def on_step_end(self) -> None:
        pass

    def observes_results(self) -> bool:
        return False

    def on_result(self, location: OpLocation, operation: str, result: Tensor) -> None:
        pass

    def on_rounded(self, location: OpLocation, operation: str, result: Tensor) -> None:
        pass

    def on_overflow(self, event: OverflowEvent) -> None:
        pass


class _Op(NamedTuple):
    location: OpLocation
    name: str
    inputs: tuple[Any, ...]


class Emulator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that runs operations and rounds their results according to a policy.

    `key` makes rounding stochastic; None rounds to nearest. `norms` are the names of norm layers.
    """

    def __init__(self, policy: Policy, tracker: OpTracker, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy = policy
        self.tracker = tracker
        self.observer = observer
        self.key: int | None = None
        self.overflowed = False
        self.norms: frozenset[str] = frozenset()
        self._keeps_fp32: dict[str, bool] = {}
        self._in_16_bits = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and round its results."""
        kwargs = kwargs or {}
        if in_bookkeeping():
            return func(*args, **kwargs)
        rule = rounding_rule(func)
        location = None if rule is RoundingRule.LEAVE else self.tracker.current()
        if location is None:
            return self._run_outside(func, args, kwargs, rule)
        grid = self._grid(location, func)
        if grid is None:
            return self._check_fp32(func(*args, **kwargs), _Op(location, base_name(func), args))
        key = None
        if self.key is not None:
            key = hash_key(self.key, location.layer, location.backward, self.tracker.next_index(location))
        if self.policy.lists is not None:
            args = tuple(self._round_input(value, key) for value in args)
        results = self._accumulate_in_half(func, args, grid, key) if self.policy.half_partials else None
        if results is None:
            results = func(*args, **kwargs)
        self._round(results, rule, _Op(location, base_name(func), args), grid, key)
        return results

    def _grid(self, location: OpLocation, func: Any) -> Grid | None:
        """Return the grid for the results of an operation, or None if it stays in fp32."""
        layer = location.layer
        if layer not in self._keeps_fp32:
            self._keeps_fp32[layer] = self.policy.keeps_fp32(layer)
        if self._keeps_fp32[layer] or self.policy.compute is FP32:
            return None
        if layer in self.norms and not is_norm(func):
            # Other operations inside a norm layer update its statistics.
            return None
        if self.policy.lists is not None:
            color = self.policy.lists.color(func)
            self._in_16_bits = self._in_16_bits if color is ListColor.GRAY else color is ListColor.WHITE
            return self.policy.grid if self._in_16_bits else None
        return self.policy.grid

    def _run_outside(self, func: Any, args: Any, kwargs: Any, rule: RoundingRule) -> Any:
        """Run an operation outside of the model in fp32, except the accumulation of 16-bit gradients."""
        results = func(*args, **kwargs)
        if rule is RoundingRule.LEAVE or self.policy.master is FP32:
            return results
        parameter = self.tracker.accumulating_parameter()
        if parameter is not None:
            location = OpLocation("accumulation", True)
            key = None if self.key is None else hash_key(self.key, location.layer, parameter)
            self._round(results, rule, _Op(location, base_name(func), args), self.policy.grid, key)
        return results

    def round_sum_(self, parameter: str, total: Tensor, added: Tensor, key: int | None) -> None:
        """Round the sum of two gradients of a parameter; `key` is that of the micro batch of the added one."""
        location = OpLocation("accumulation", True)
        key = None if key is None else hash_key(key, location.layer, parameter)
        self._round(total, RoundingRule.ROUND, _Op(location, "add", (total, added)), self.policy.grid, key)

    def _round(self, results: Any, rule: RoundingRule, op: _Op, grid: Grid, key: int | None) -> None:
        tensors = _tensors(results)
        first_only = rule is RoundingRule.ROUND_FIRST and not self.policy.half_norm_statistics
        observed, flags = self.observer.observes_results(), 0
        for index, tensor in enumerate(tensors[:1] if first_only else tensors):
            if observed:
                self.observer.on_result(op.location, op.name, tensor)
            flags |= round_(tensor, grid, None if key is None else key ^ index)
            if observed:
                self.observer.on_rounded(op.location, op.name, tensor)
        if flags & _BAD:
            self.report_overflow(OverflowEvent(op.location, op.name, Flags(flags), op.inputs, tuple(tensors)))

    def _check_fp32(self, results: Any, op: _Op) -> Any:
        """Observe the results of an operation in fp32 without rounding them."""
        if self.policy.exceptions or self.observer.observes_results():
            self._round(results, RoundingRule.ROUND, op, _FP32_GRID, None)
        return results

    def report_overflow(self, event: OverflowEvent) -> None:
        """Set the overflow flag and notify the observer."""
        self.overflowed = True
        self.observer.on_overflow(event)

    def _round_input(self, value: Any, key: int | None) -> Any:
        if not is_floating(value):
            return value
        return rounded(value, self.policy.grid, None if key is None else hash_key(key, "input"))

    def _accumulate_in_half(self, func: Any, args: Any, grid: Grid, key: int | None) -> Any:
        name = base_name(func)
        if name in ("mm", "addmm", "linear"):
            return _half_product(name, args, grid, key)
        if name in ("convolution", "conv2d"):
            x, weight, bias = args[:3]
            rest = args[3:] if name == "convolution" else ()
            stride, padding, dilation = rest[:3] if rest else _conv2d_options(args)
            groups = rest[5] if rest else (args[6] if len(args) > 6 else 1)
            return Convolution(stride, padding, dilation, groups, grid).forward(x, weight, bias, key)
        if name == "convolution_backward":
            grad, x, weight, _, stride, padding, dilation, _, _, groups, output_mask = args
            return Convolution(stride, padding, dilation, groups, grid).backward(grad, x, weight, output_mask, key)
        return None


def _conv2d_options(args: Any) -> tuple[Any, Any, Any]:
    options = list(args[3:6]) + [[1, 1], [0, 0], [1, 1]][len(args[3:6]) :]
    stride, padding, dilation = (value * 2 if len(value) == 1 else value for value in options)
    return stride, padding, dilation


def _half_product(name: str, args: Any, grid: Grid, key: int | None) -> Tensor:
    if name == "mm":
        return multiply(args[0], args[1], grid, key)
    if name == "addmm":
        return multiply_add(args[0], args[1], args[2], grid, key)
    x, weight, *bias = args
    flat = x.reshape(-1, x.shape[-1])
    has_bias = bias and bias[0] is not None
    out = multiply_add(bias[0], flat, weight.t(), grid, key) if has_bias else multiply(flat, weight.t(), grid, key)
    return out.view(*x.shape[:-1], -1)


def _tensors(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results] if is_floating(results) else []
    return [result for result in results if is_floating(result)] if isinstance(results, (tuple, list)) else []


class _RoundForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, key: int | None) -> Tensor:
        return rounded(x, grid, key)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class _RoundBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, key: int | None, on_flags: Callable[[int], None]) -> Tensor:
        ctx.rounding = (grid, key, on_flags)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grid, key, on_flags = ctx.rounding
        grad = grads[0].detach().clone()
        on_flags(round_(grad, grid, key))
        return grad, None, None, None


class CastBoundary:
    """Casts between 16 bits and fp32. A `site` names the cast in the key of its rounding."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._grid = emulator.policy.grid

    def round_forward(self, x: Any, site: str) -> Any:
        """Cast to 16 bits."""
        return _RoundForward.apply(x, self._grid, self._key(site)) if is_floating(x) else x  # type: ignore[no-untyped-call]

    def round_backward(self, x: Any, site: str) -> Any:
        """Cast to fp32, which rounds the gradient on its way back."""
        if not is_floating(x):
            return x
        return _RoundBackward.apply(x, self._grid, self._key(site), self._overflow_check(site))  # type: ignore[no-untyped-call]

    def wrap(self, layer: str, module: nn.Module) -> None:
        """Put casts around a layer that stays in fp32."""
        tracker = self._emulator.tracker

        def on_enter(module: nn.Module, args: Any) -> Any:
            return tuple(self.round_backward(x, f"{layer}>") for x in args) if tracker.active else None

        def on_leave(module: nn.Module, args: Any, output: Any) -> Any:
            return self.round_forward(output, f"{layer}<") if tracker.active else None

        module.register_forward_pre_hook(on_enter)
        module.register_forward_hook(on_leave)

    def _key(self, site: str) -> int | None:
        return None if self._emulator.key is None else hash_key(self._emulator.key, site)

    def _overflow_check(self, site: str) -> Callable[[int], None]:
        def on_flags(flags: int) -> None:
            if flags & _BAD:
                location = OpLocation("loss" if site == "network<" else site.rstrip("<>"), True)
                self._emulator.report_overflow(OverflowEvent(location, "cast", Flags(flags), (), ()))

        return on_flags


@contextmanager
def swapped_weights(weights: list[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Give parameters other values inside the block. The masters are restored even after an error."""
    masters = [parameter.data for parameter, _ in weights]
    for parameter, value in weights:
        parameter.data = value
    try:
        yield
    finally:
        for (parameter, _), master in zip(weights, masters, strict=True):
            parameter.data = master
