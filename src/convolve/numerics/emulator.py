"""A 16-bit machine made of fp32: every operation runs in fp32, and its result is put on the 16-bit grid at once.

This is what hardware does that multiplies 16-bit numbers and adds them up in fp32: the inputs of each operation lie on
the grid, and its output is rounded to it, once. It happens below autograd, so backward operations are treated like
forward ones. Where 16 bits and fp32 meet there are gates, which are casts written as identities with one side rounded:

    narrow   forward: round          backward: pass     into the network, and out of a layer that stays in fp32
    widen    forward: pass           backward: round    out of the network, and into a layer that stays in fp32
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

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

_CHECKED = Grid(FP32)
_BAD = int(Flags.OVERFLOW | Flags.NAN | Flags.INFINITY)


@dataclass(frozen=True)
class OverflowEvent:
    """An operation whose result left the format: where, what, and with which values."""

    place: OpLocation
    operation: str
    flags: Flags
    inputs: tuple[Any, ...]
    results: tuple[Tensor, ...]


class Observer(Protocol):
    """Somebody who looks at values while they are computed."""

    def begin(self, step: int) -> None:
        """A training step begins."""

    def end(self) -> None:
        """The passes of the step are done."""

    def watching(self) -> bool:
        """Whether the results of this pass are wanted."""

    def see(self, place: OpLocation, operation: str, result: Tensor) -> None:
        """A result, before it is rounded."""

    def keep(self, place: OpLocation, operation: str, result: Tensor) -> None:
        """A result as the network goes on with it."""

    def meet(self, meeting: OverflowEvent) -> None:
        """A result left the format."""


class NullObserver:
    """Looks at nothing; the base of those who look at one thing only."""

    def begin(self, step: int) -> None:
        """Let it begin."""

    def end(self) -> None:
        """Let it end."""

    def watching(self) -> bool:
        """Nothing is wanted."""
        return False

    def see(self, place: OpLocation, operation: str, result: Tensor) -> None:
        """Let it pass."""

    def keep(self, place: OpLocation, operation: str, result: Tensor) -> None:
        """Let it pass."""

    def meet(self, meeting: OverflowEvent) -> None:
        """Let it pass."""


class Emulator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations and rounds their results as a policy says."""

    def __init__(self, policy: Policy, places: OpTracker, watcher: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy = policy
        self.places = places
        self.watcher = watcher
        self.key: int | None = None
        self.overflowed = False
        self.norms: frozenset[str] = frozenset()
        self._strict = policy.exceptions
        self._forced: dict[str, bool] = {}
        self._in_16_bits = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and round what comes out."""
        kwargs = kwargs or {}
        if in_bookkeeping():
            return func(*args, **kwargs)
        traits = rounding_rule(func)
        place = None if traits is RoundingRule.LEAVE else self.places.now()
        if place is None:
            return self._run_outside(func, args, kwargs, traits)
        grid = self._grid(place, func)
        if grid is None:
            return self._look(func(*args, **kwargs), place, func, args)
        key = None if self.key is None else hash_key(self.key, place.layer, place.backward, self.places.number(place))
        if self.policy.lists is not None:
            args = tuple(self._narrowed(value, key) for value in args)
        results = self._partial(func, args, grid, key) if self.policy.half_partials else None
        if results is None:
            results = func(*args, **kwargs)
        self._round(results, traits, (place, base_name(func), args), grid, key)
        return results

    def _grid(self, place: OpLocation, func: Any) -> Grid | None:
        """The grid for an operation; None where it stays in fp32."""
        layer = place.layer
        if layer not in self._forced:
            self._forced[layer] = self.policy.keeps_fp32(layer)
        if self._forced[layer] or self.policy.compute is FP32:
            return None
        if layer in self.norms and not is_norm(func):
            # What a norm's module does besides is bookkeeping of its statistics.
            return None
        if self.policy.lists is not None:
            color = self.policy.lists.color(func)
            self._in_16_bits = self._in_16_bits if color is ListColor.GRAY else color is ListColor.WHITE
            return self.policy.grid if self._in_16_bits else None
        return self.policy.grid

    def _run_outside(self, func: Any, args: Any, kwargs: Any, traits: RoundingRule) -> Any:
        """Operations outside of the network are in fp32, except the accumulation of 16-bit gradients."""
        results = func(*args, **kwargs)
        if traits is RoundingRule.LEAVE or self.policy.master is FP32:
            return results
        parameter = self.places.accumulating()
        if parameter is not None:
            place = OpLocation("accumulation", True)
            key = None if self.key is None else hash_key(self.key, place.layer, parameter)
            self._round(results, traits, (place, base_name(func), args), self.policy.grid, key)
        return results

    def _round(
        self, results: Any, traits: RoundingRule, what: tuple[OpLocation, str, Any], grid: Grid, key: int | None
    ) -> None:
        tensors = _tensors(results)
        first_only = traits is RoundingRule.ROUND_FIRST and not self.policy.half_norm_statistics
        watching, flags = self.watcher.watching(), 0
        for number, tensor in enumerate(tensors[:1] if first_only else tensors):
            if watching:
                self.watcher.see(what[0], what[1], tensor)
            flags |= round_(tensor, grid, None if key is None else key ^ number)
            if watching:
                self.watcher.keep(what[0], what[1], tensor)
        if flags & _BAD:
            self.report(flags, what, tensors)

    def _look(self, results: Any, place: OpLocation, func: Any, args: Any) -> Any:
        """An operation in fp32: watched, not rounded."""
        if self._strict or self.watcher.watching():
            self._round(results, RoundingRule.ROUND, (place, base_name(func), args), _CHECKED, None)
        return results

    def report(self, flags: int, what: tuple[OpLocation, str, Any], tensors: list[Tensor]) -> None:
        """A result left its format: remember it, and tell whoever watches."""
        self.overflowed = True
        self.watcher.meet(OverflowEvent(what[0], what[1], Flags(flags), what[2], tuple(tensors)))

    def _narrowed(self, value: Any, key: int | None) -> Any:
        if not is_floating(value):
            return value
        return rounded(value, self.policy.grid, None if key is None else hash_key(key, "input"))

    def _partial(self, func: Any, args: Any, grid: Grid, key: int | None) -> Any:
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
            grad, x, weight, _, stride, padding, dilation, _, _, groups, wanted = args
            return Convolution(stride, padding, dilation, groups, grid).backward(grad, x, weight, wanted, key)
        return None


def _conv2d_options(args: Any) -> tuple[Any, Any, Any]:
    given = list(args[3:6]) + [[1, 1], [0, 0], [1, 1]][len(args[3:6]) :]
    stride, padding, dilation = (value * 2 if len(value) == 1 else value for value in given)
    return stride, padding, dilation


def _half_product(name: str, args: Any, grid: Grid, key: int | None) -> Tensor:
    if name == "mm":
        return multiply(args[0], args[1], grid, key)
    if name == "addmm":
        return multiply_add(args[0], args[1], args[2], grid, key)
    x, weight, *bias = args
    flat = x.reshape(-1, x.shape[-1])
    known = bias and bias[0] is not None
    out = multiply_add(bias[0], flat, weight.t(), grid, key) if known else multiply(flat, weight.t(), grid, key)
    return out.view(*x.shape[:-1], -1)


def _tensors(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results] if is_floating(results) else []
    return [one for one in results if is_floating(one)] if isinstance(results, (tuple, list)) else []


class _RoundForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, key: int | None) -> Tensor:
        return rounded(x, grid, key)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class _RoundBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, key: int | None, seen: Callable[[int], None]) -> Tensor:
        ctx.how = (grid, key, seen)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grid, key, seen = ctx.how
        grad = grads[0].detach().clone()
        seen(round_(grad, grid, key))
        return grad, None, None, None


class CastBoundary:
    """The casts at the borders between 16 bits and fp32."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._grid = emulator.policy.grid

    def narrow(self, x: Any, place: str) -> Any:
        """Into 16 bits."""
        return _RoundForward.apply(x, self._grid, self._key(place)) if is_floating(x) else x  # type: ignore[no-untyped-call]

    def widen(self, x: Any, place: str) -> Any:
        """Into fp32; the gradient that comes back is rounded."""
        if not is_floating(x):
            return x
        return _RoundBackward.apply(x, self._grid, self._key(place), self._see(place))  # type: ignore[no-untyped-call]

    def surround(self, layer: str, module: nn.Module) -> None:
        """Gates around a layer that stays in fp32."""
        active = self._emulator.places

        def enter(module: nn.Module, args: Any) -> Any:
            return tuple(self.widen(x, f"{layer}>") for x in args) if active.active else None

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return self.narrow(output, f"{layer}<") if active.active else None

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def _key(self, place: str) -> int | None:
        return None if self._emulator.key is None else hash_key(self._emulator.key, place)

    def _see(self, place: str) -> Callable[[int], None]:
        def seen(flags: int) -> None:
            if flags & _BAD:
                where = OpLocation("loss" if place == "network<" else place.rstrip("<>"), True)
                self._emulator.report(flags, (where, "cast", ()), [])

        return seen


@contextmanager
def swapped_weights(weights: list[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Parameters hold other values for a while; the old ones come back, whatever happens."""
    masters = [parameter.data for parameter, _ in weights]
    for parameter, value in weights:
        parameter.data = value
    try:
        yield
    finally:
        for (parameter, _), master in zip(weights, masters, strict=True):
            parameter.data = master
