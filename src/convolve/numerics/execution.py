"""Carry out a precision policy: how a model computes, and how its weights are stored between steps.

`PlainExecution` is fp32 and costs nothing. `AutocastExecution` lets torch.autocast pick the 16-bit kernels of the
device. `EmulatedExecution` computes in fp32 and rounds every result. All of them store the weights of 16.16 as fp32
tensors with values on the 16-bit grid, so a checkpoint fits each of them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from convolve.numerics.emulator import CastBoundary, Emulator, NullObserver, Observer, swapped_weights
from convolve.numerics.formats import FP32
from convolve.numerics.op_location import OpTracker, PassTrace
from convolve.numerics.policy import Policy
from convolve.numerics.rounding import Grid, round_without_flags_, rounded
from convolve.rng import hash_key

NORM_MODULES = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
# 16 bits cannot represent sums of squares of gradients; the original systems keep them in fp32 as well.
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "step")


class Execution(Protocol):
    """Interface of an execution. `foldable` is True if layers may be folded or fused: no result is rounded."""

    policy: Policy
    foldable: bool

    def install(self, model: nn.Module) -> None:
        """Take charge of a model. Call once, before any other method."""

    def round_initial_weights(self) -> None:
        """Round the weights of a new run to the master format. A restored model has rounded weights already."""

    def step_context(self, seed: int, step: int) -> AbstractContextManager[None]:
        """Return the context for all passes of one step."""

    def micro_batch(self, first: int) -> AbstractContextManager[None]:
        """Return the context for forward and backward of one micro batch, whose first sample has index `first`.

        A pipeline exits after the forward pass and enters again for the backward pass, other micro batches between.
        """

    def repetition(self, first: int) -> AbstractContextManager[None]:
        """Return the context around a `micro_batch` that is computed a second time, with the roundings of the first."""

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        """Run the model in this arithmetic and return its fp32 output. Outside of `micro_batch` this is evaluation."""

    @property
    def rounds_sums(self) -> bool:
        """True if sums of gradients are rounded to the master format."""

    def add_gradients_(self, names: list[str], left: list[Tensor], right: list[Tensor], first: int) -> None:
        """Add gradients of parameters in place, to `left`; `first` is the first sample of the right ones."""

    def overflowed(self) -> bool:
        """Return whether a value left its format since the last call."""

    def round_weights_(self, optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
        """Round weights and optimizer state to the master format after an update, in place."""


class PlainExecution:
    """fp32 as PyTorch computes it; the base class of the others."""

    policy = Policy()
    foldable = True
    rounds_sums = False

    def install(self, model: nn.Module) -> None:
        pass

    def round_initial_weights(self) -> None:
        pass

    def step_context(self, seed: int, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def micro_batch(self, first: int) -> AbstractContextManager[None]:
        return nullcontext()

    def repetition(self, first: int) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = model(x)
        return output

    def add_gradients_(self, names: list[str], left: list[Tensor], right: list[Tensor], first: int) -> None:
        torch._foreach_add_(left, right)

    def overflowed(self) -> bool:
        return False

    def round_weights_(self, optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
        pass


@dataclass
class RoundedWeights:
    """Weights of a model under a policy, between steps and inside them."""

    policy: Policy
    model: nn.Module

    def round_initial_(self) -> None:
        """Round to the master format, to nearest."""
        if self.policy.master is not FP32:
            for _, parameter in self._in_16_bits():
                round_without_flags_(parameter.data, self.policy.master_grid)

    def round_updated_(self, optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
        """Round weights and optimizer state to the master format, with the rounding of the policy."""
        if self.policy.master is FP32:
            return
        grid = self.policy.master_grid
        for name, parameter in self._in_16_bits():
            round_without_flags_(parameter.data, grid, self._key(seed, step, name))
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and slot not in SECOND_MOMENTS and value.dtype == torch.float32:
                    round_without_flags_(value, grid, self._key(seed, step, f"{name}.{slot}"))
        if self.policy.half_norm_statistics:
            for buffer in self.model.buffers():
                if buffer.dtype == torch.float32:
                    round_without_flags_(buffer, grid)

    def compute_copies(self, grid: Grid, key: int | None) -> list[tuple[nn.Parameter, Tensor]]:
        """Return rounded copies to compute with if the master weights are fp32, otherwise nothing."""
        if self.policy.master is not FP32 or self.policy.compute is FP32 or self.policy.lists is not None:
            return []
        # Devices that are not part of torch do not accept a tensor of inference mode as the data of a parameter.
        with torch.inference_mode(False), torch.no_grad():
            return [
                (parameter, rounded(parameter.data, grid, None if key is None else hash_key(key, name)))
                for name, parameter in self._in_16_bits()
            ]

    def _in_16_bits(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            if not self.policy.keeps_fp32(name.replace(".", "/")) and parameter.dtype == torch.float32:
                yield name, parameter

    def _key(self, seed: int, step: int, slot: str) -> int | None:
        return hash_key(seed, step, "update", slot) if self.policy.stochastic else None


class _RoundedExecution(PlainExecution):
    """Stores the weights of one model under a policy."""

    foldable = False

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def install(self, model: nn.Module) -> None:
        self._weights = RoundedWeights(self.policy, model)

    def round_initial_weights(self) -> None:
        self._weights.round_initial_()

    def round_weights_(self, optimizer: torch.optim.Optimizer, seed: int, step: int) -> None:
        self._weights.round_updated_(optimizer, seed, step)


class AutocastExecution(_RoundedExecution):
    """16-bit kernels of the device through torch.autocast, which also makes the 16-bit copies of the weights.

    Computation rounds to nearest. Kernels do not report overflow; it shows in gradients that are not finite.
    """

    def __init__(self, policy: Policy, device: torch.device) -> None:
        super().__init__(policy)
        self._device = device

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(self._device.type, dtype=self.policy.compute.dtype):
            output: Tensor = model(x)
        return output.float()


class EmulatedExecution(_RoundedExecution):
    """fp32 kernels with every result rounded. Forward hooks on the layers serve only to name them."""

    def __init__(self, policy: Policy, observer: Observer | None = None) -> None:
        super().__init__(policy)
        self.tracker = OpTracker()
        self.emulator = Emulator(policy, self.tracker, observer or NullObserver())
        self._boundary = CastBoundary(self.emulator)
        self._casts_ends = policy.compute is not FP32 and policy.lists is None
        self._step: tuple[int, int] = (0, 0)
        self._traces: dict[int, PassTrace] = {}

    def install(self, model: nn.Module) -> None:
        super().install(model)
        self.tracker.install(model)
        layers = {name.replace(".", "/"): module for name, module in model.named_modules()}
        self.emulator.norms = frozenset(name for name, module in layers.items() if isinstance(module, NORM_MODULES))
        if self.policy.compute is not FP32:
            for name in self.policy.force_fp32:
                if name in layers:
                    self._boundary.wrap(name, layers[name])

    @contextmanager
    def step_context(self, seed: int, step: int) -> Iterator[None]:
        self._step, self._traces = (seed, step), {}
        key = hash_key(seed, step, "weights") if self.policy.stochastic else None
        observer = self.emulator.observer
        with swapped_weights(self._weights.compute_copies(self.policy.grid, key)):
            observer.on_step_start(step)
            yield
            observer.on_step_end()

    @contextmanager
    def micro_batch(self, first: int) -> Iterator[None]:
        self.emulator.key = hash_key(*self._step, first, "rounding") if self.policy.stochastic else None
        with self._rounding(self._traces.setdefault(first, PassTrace())):
            yield

    @contextmanager
    def repetition(self, first: int) -> Iterator[None]:
        """Start a new trace, which counts operations from zero, and hide the repetition from the observer."""
        tracker, emulator, trace = self.tracker, self.emulator, self._traces.pop(first, None)
        before = tracker.trace, tracker.active, emulator.key, emulator.observer
        emulator.observer = NullObserver()
        try:
            yield
        finally:
            tracker.trace, tracker.active, emulator.key, emulator.observer = before
            if trace is not None:
                self._traces[first] = trace

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        assert model is self._weights.model, "only the installed model has its weights rounded"
        with nullcontext() if self.tracker.active else self._evaluation():
            if self._casts_ends:
                x = self._boundary.round_forward(x, "network>")
            self.tracker.enter("")
            try:
                output: Tensor = model(x)
            finally:
                self.tracker.leave()
            return self._boundary.round_backward(output, "network<") if self._casts_ends else output

    @contextmanager
    def _rounding(self, trace: PassTrace) -> Iterator[None]:
        self.tracker.trace = trace
        self.tracker.active = True
        try:
            with self.emulator:
                yield
        finally:
            self.tracker.active = False

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """Round to nearest, so an evaluation can be repeated."""
        self.emulator.key = None
        with swapped_weights(self._weights.compute_copies(self.policy.grid, None)), self._rounding(PassTrace()):
            yield

    @property
    def rounds_sums(self) -> bool:  # type: ignore[override]
        return self.policy.master is not FP32

    def add_gradients_(self, names: list[str], left: list[Tensor], right: list[Tensor], first: int) -> None:
        super().add_gradients_(names, left, right, first)
        if self.rounds_sums:
            key = hash_key(*self._step, first, "rounding") if self.policy.stochastic else None
            for name, total, added in zip(names, left, right, strict=True):
                self.emulator.round_sum_(name, total, added, key)

    def overflowed(self) -> bool:
        overflowed, self.emulator.overflowed = self.emulator.overflowed, False
        return overflowed
