"""The two executions of a policy, and the choice between them.

`PlainArithmetic` is fp32 and costs nothing. `NativeArithmetic` lets torch.autocast pick the 16-bit kernels of the
machine. `EmulatedArithmetic` computes in fp32 and rounds. All three keep weights of 16.16 as fp32 tensors whose values
lie on the 16-bit grid, so one checkpoint fits all of them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from convolve.numerics.emulator import CastBoundary, Emulator, NullObserver, Observer, swapped_weights
from convolve.numerics.formats import FP32
from convolve.numerics.op_location import OpTracker, PassTrace
from convolve.numerics.policy import Policy
from convolve.numerics.rounding import Grid, round_, rounded
from convolve.rng import hash_key

NORM_MODULES = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
# Sums of squares of gradients: 16 bits cannot hold them, and the originals keep them in fp32 as well.
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "step")


class Execution(Protocol):
    """How a network computes, and how its weights are kept."""

    policy: Policy

    def attach(self, network: nn.Module) -> None:
        """Take charge of a network: from now on every pass of it is computed this way."""

    def begin(self) -> None:
        """Put initial weights where the policy wants them; a restored network has them there already."""

    def window(self, seed: int, step: int) -> AbstractContextManager[None]:
        """All passes of one step happen inside this."""

    def micro_batch(self, first: int) -> AbstractContextManager[None]:
        """Forward and backward of one micro batch happen inside this; `first` is its place in the window.

        A pipeline leaves after the forward pass and enters again for the backward pass, other micro batches between.
        """

    def overflowed(self) -> bool:
        """Whether a value left its format since this was asked last."""

    def settle(self, optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
        """Put weights and optimizer state where the policy wants them, after an update."""


class PlainExecution:
    """fp32 as torch does it."""

    policy = Policy()

    def attach(self, network: nn.Module) -> None:
        """Nothing to do."""

    def begin(self) -> None:
        """Nothing to do."""

    def window(self, seed: int, step: int) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def micro_batch(self, first: int) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def overflowed(self) -> bool:
        """Nobody looked."""
        return False

    def settle(self, optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
        """Nothing to do."""


@dataclass
class RoundedWeights:
    """The weights of a network under a policy: where they lie between steps, and how they get there."""

    policy: Policy
    network: nn.Module

    def begin(self) -> None:
        """Onto the grid of the master format, to nearest."""
        if self.policy.master is not FP32:
            for _, parameter in self._kept_in_16_bits():
                round_(parameter.data, self.policy.master_grid)

    def settle(self, optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
        """Onto the grid after an update, with the policy's rounding; optimizer state too."""
        if self.policy.master is FP32:
            return
        grid = self.policy.master_grid
        for name, parameter in self._kept_in_16_bits():
            round_(parameter.data, grid, self._key(seed, step, name))
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and slot not in SECOND_MOMENTS and value.dtype == torch.float32:
                    round_(value, grid, self._key(seed, step, f"{name}.{slot}"))
        if self.policy.half_norm_statistics:
            for buffer in self.network.buffers():
                if buffer.dtype == torch.float32:
                    round_(buffer, grid)

    def copies(self, grid: Grid, key: int | None) -> list[tuple[nn.Parameter, Tensor]]:
        """Rounded copies for the computation, where weights themselves are in fp32."""
        if self.policy.master is not FP32 or self.policy.compute is FP32 or self.policy.lists is not None:
            return []
        return [
            (parameter, rounded(parameter.data, grid, None if key is None else hash_key(key, name)))
            for name, parameter in self._kept_in_16_bits()
        ]

    def _kept_in_16_bits(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.network.named_parameters():
            if not self.policy.keeps_fp32(name.replace(".", "/")) and parameter.dtype == torch.float32:
                yield name, parameter

    def _key(self, seed: int, step: int, place: str) -> int | None:
        return hash_key(seed, step, "update", place) if self.policy.stochastic else None


class AutocastExecution:
    """The machine's own 16-bit kernels, through torch.autocast. Computation rounds to nearest."""

    def __init__(self, policy: Policy, where: torch.device) -> None:
        self.policy = policy
        self._where = where
        self._open: list[ExitStack] = []

    def attach(self, network: nn.Module) -> None:
        """Every pass of this very network (not of a copy) runs under autocast; its output is fp32."""
        self._weights = RoundedWeights(self.policy, network)

        def enter(module: nn.Module, args: Any) -> None:
            if module is network:
                stack = ExitStack()
                stack.enter_context(torch.autocast(self._where.type, dtype=self.policy.compute.dtype))
                self._open.append(stack)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if module is network and self._open:
                self._open.pop().close()
                return output.float() if isinstance(output, Tensor) else output
            return None

        network.register_forward_pre_hook(enter)
        network.register_forward_hook(leave, always_call=True)

    def begin(self) -> None:
        """Weights of 16.16 onto the grid."""
        self._weights.begin()

    def window(self, seed: int, step: int) -> AbstractContextManager[None]:
        """Nothing to do: autocast makes the copies."""
        return nullcontext()

    def micro_batch(self, first: int) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def overflowed(self) -> bool:
        """Native kernels do not tell; gradients that are not finite do."""
        return False

    def settle(self, optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
        """Weights and state of 16.16 onto the grid."""
        self._weights.settle(optimizer, seed, step)


class EmulatedExecution:
    """fp32 kernels, with each result rounded."""

    def __init__(self, policy: Policy, watcher: Observer | None = None) -> None:
        self.policy = policy
        self.places = OpTracker()
        self.emulator = Emulator(policy, self.places, watcher or NullObserver())
        self._gates = CastBoundary(self.emulator)
        self._window: tuple[int, int] = (0, 0)
        self._tracks: dict[int, PassTrace] = {}
        self._passes: list[ExitStack] = []

    def attach(self, network: nn.Module) -> None:
        """Hooks on the network and its layers; a copy of the network does not compute this way."""
        self._weights = RoundedWeights(self.policy, network)
        self.places.attach(network)
        self.emulator.norms = frozenset(
            name.replace(".", "/") for name, module in network.named_modules() if isinstance(module, NORM_MODULES)
        )
        for name, module in network.named_modules():
            if name.replace(".", "/") in self.policy.force_fp32 and self.policy.compute is not FP32:
                self._gates.surround(name.replace(".", "/"), module)
        self._attach_ends(network)

    def _attach_ends(self, network: nn.Module) -> None:
        in_16_bits = self.policy.compute is not FP32 and self.policy.lists is None

        def enter(module: nn.Module, args: Any) -> Any:
            if module is not network:
                return None
            stack = ExitStack()
            self._passes.append(stack)
            if not self.places.active:
                stack.enter_context(self._evaluating())
            narrowed = tuple(self._gates.narrow(x, "network>") for x in args) if in_16_bits else args
            self.places.enter("")
            return narrowed

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if module is not network or not self._passes:
                return None
            self.places.leave()
            if in_16_bits and output is not None:
                output = self._gates.widen(output, "network<")
            self._passes.pop().close()
            return output

        network.register_forward_pre_hook(enter)
        network.register_forward_hook(leave, always_call=True)

    def begin(self) -> None:
        """Weights of 16.16 onto the grid."""
        self._weights.begin()

    @contextmanager
    def window(self, seed: int, step: int) -> Iterator[None]:
        """Weights as the computation sees them."""
        self._window, self._tracks = (seed, step), {}
        key = hash_key(seed, step, "weights") if self.policy.stochastic else None
        watcher = self.emulator.watcher
        with swapped_weights(self._weights.copies(self.policy.grid, key)):
            watcher.begin(step)
            yield
            watcher.end()

    @contextmanager
    def micro_batch(self, first: int) -> Iterator[None]:
        """Round every result until this is left."""
        self.emulator.key = hash_key(*self._window, first, "rounding") if self.policy.stochastic else None
        with self._rounding(self._tracks.setdefault(first, PassTrace())):
            yield

    @contextmanager
    def _rounding(self, track: PassTrace) -> Iterator[None]:
        self.places.follow(track)
        self.places.active = True
        try:
            with self.emulator:
                yield
        finally:
            self.places.active = False

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """A pass outside of training: to nearest, so that it can be repeated."""
        self.emulator.key = None
        with swapped_weights(self._weights.copies(self.policy.grid, None)), self._rounding(PassTrace()):
            yield

    def overflowed(self) -> bool:
        """Whether a value left the format since the last time."""
        met, self.emulator.overflowed = self.emulator.overflowed, False
        return met

    def settle(self, optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
        """Weights and state of 16.16 onto the grid."""
        self._weights.settle(optimizer, seed, step)
