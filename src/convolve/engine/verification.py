"""Find silent data corruption: bits that change in memory, and results that are wrong without an error.

    state         weights, norm statistics, optimizer state and averages get a checksum after each update, which is
                  compared before the next update and before a checkpoint
    replicas      every REPLICA_STEPS steps and before a checkpoint, replicas compare the checksums of their weights
    passes        each micro batch of a step is computed again in one of RECOMPUTED_EVERY steps, chosen by a hash of
                  seed, step and number, and loss and gradients are compared bit for bit

The arithmetic: a checksum is the sum of the 32-bit words of a tensor modulo 2^32. A change of one bit changes it by
2^k, so it is always found. Changes of several bits cancel with a probability of about 2^-32.

Nothing here changes a result: a second pass adds no gradient, no statistic and no metric, and draws the random numbers
of the first one.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from convolve import rng
from convolve.distributed.collectives import Collectives
from convolve.engine.state import TrainState
from convolve.errors import CorruptionError
from convolve.kernels import checksum
from convolve.kernels.checksum import Words
from convolve.layers.batch_norm import StepStatistics

RECOMPUTED_EVERY = 100
REPLICA_STEPS = 16
REMEDY = "check the memory and the processor of this machine; resume with `convolve restore`"
# Loss and gradients of one pass, by name.
PassResults = Mapping[str, Tensor | None]
PassFn = Callable[[], PassResults]


class Verification(Protocol):
    """Checks of a run, called by the step."""

    def record(self, state: TrainState) -> None:
        """Compute the checksums of a state that is known to be good."""

    def check(self, state: TrainState) -> None:
        """Raise CorruptionError if the state differs from the recorded one."""

    def check_replicas(self, state: TrainState, *, due: bool) -> None:
        """Raise CorruptionError if replicas have different weights; not due, only every few steps."""

    def compare_pass(self, step: int, number: int, first: PassFn, again: PassFn) -> None:
        """Compute a chosen micro batch again; raise CorruptionError if a result differs."""


class NoVerification:
    """Null object of `Verification`."""

    def record(self, state: TrainState) -> None:
        pass

    def check(self, state: TrainState) -> None:
        pass

    def check_replicas(self, state: TrainState, *, due: bool) -> None:
        pass

    def compare_pass(self, step: int, number: int, first: PassFn, again: PassFn) -> None:
        pass


class TensorMemory:
    """The memory of some tensors, of which it computes checksums."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.names, self.tensors = list(named), list(named.values())
        self._find()

    def _find(self) -> None:
        self._on_host = [tensor for tensor in self.tensors if tensor.device.type == "cpu"]
        self._addresses = [tensor.data_ptr() for tensor in self._on_host]
        words = [_words(tensor) for tensor in self.tensors]
        self._elsewhere = [number for number, found in enumerate(words) if found is None]
        # Blocks that are elsewhere stay empty, and their sums are filled in afterward.
        self._sum_words = checksum.bind([np.empty(0, np.uint32) if found is None else found for found in words])

    def checksums(self) -> Words:
        """Return the checksum of each tensor. Those of an accelerator are copied to the host together."""
        if list(map(Tensor.data_ptr, self._on_host)) != self._addresses:
            self._find()
        sums = self._sum_words()
        if self._elsewhere:
            copied = torch.stack([_device_checksum(self.tensors[number]) for number in self._elsewhere]).tolist()
            sums[self._elsewhere] = np.array(copied, np.int64).astype(np.uint32)
        return sums


class StepVerification:
    """The checks of one process. `span` joins micro batches that normalize as one and are computed again together."""

    def __init__(self, model: nn.Module, collectives: Collectives, seed: int, span: int = 1) -> None:
        self._weights = dict(_weights(model))
        self._others: list[Tensor] = []
        self._memory = TensorMemory(self._weights)
        self._recorded = self._memory.checksums()
        self._collectives = collectives
        self.seed, self._span = seed, span

    def record(self, state: TrainState) -> None:
        slots = [value for slots in state.optimizer.state.values() for value in slots.values()]
        others = [value for value in slots if isinstance(value, Tensor)] + list(state.ema.tensors().values())
        if len(others) != len(self._others) or not all(map(operator.is_, others, self._others)):
            self._others = others
            self._memory = TensorMemory(self._weights | _optimizer_state(state) | _averages(state))
        self._recorded = self._memory.checksums()

    def check(self, state: TrainState) -> None:
        sums = self._memory.checksums()
        if sums.tobytes() != self._recorded.tobytes():
            raise CorruptionError(
                f"changed between two updates, found at step {state.step + 1}; {REMEDY}",
                subject=self._memory.names[int(np.argmax(sums != self._recorded))],
            )

    def check_replicas(self, state: TrainState, *, due: bool) -> None:
        topology = self._collectives.topology
        if topology.replicas == 1 or not (due or state.step % REPLICA_STEPS == 0):
            return
        sums = torch.zeros(topology.replicas, len(self._weights), dtype=torch.int64)
        sums[topology.replica] = torch.from_numpy(self._recorded[: len(self._weights)].astype(np.int64))
        sums = self._collectives.sum_over_replicas(sums)
        usual = sums.mode(dim=0).values
        for replica, column in (sums != usual).nonzero().tolist():
            found = f"replica {replica} has other weights than the others"
            if topology.replicas == 2:
                found = "the two replicas have different weights"
            raise CorruptionError(f"{found} at step {state.step}; {REMEDY}", subject=self._memory.names[column])

    def compare_pass(self, step: int, number: int, first: PassFn, again: PassFn) -> None:
        if not is_chosen(self.seed, step, number // self._span):
            return
        second = again()
        name = _find_difference(first(), second)
        if name is None:
            return
        problem = f"differs when micro batch {number} of step {step + 1} is computed again"
        if _find_difference(second, again()) is not None:
            raise CorruptionError(
                f"{problem}, and differs once more the third time; {REMEDY}, without --verify-steps if the model or "
                "the device does not repeat its results",
                subject=name,
            )
        raise CorruptionError(f"{problem}; {REMEDY}", subject=name)


def is_chosen(seed: int, step: int, number: int) -> bool:
    """Return whether the micro batches of a span are computed again: in one of each RECOMPUTED_EVERY steps."""
    return step % RECOMPUTED_EVERY == _chosen_step(seed, step // RECOMPUTED_EVERY, number, RECOMPUTED_EVERY)


@lru_cache
def _chosen_step(seed: int, group: int, number: int, steps: int) -> int:
    """Draw one of the steps of a group."""
    return rng.hash_key(seed, "verify", group, number) % steps


@contextmanager
def without_side_effects(model: nn.Module) -> Iterator[None]:
    """Run a pass inside that collects no norm statistics and leaves all buffers as they are."""
    norms = [module for module in model.modules() if isinstance(module, StepStatistics)]
    collected = [norm.accumulate_stats for norm in norms]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for norm in norms:
        norm.accumulate_stats = False
    try:
        yield
    finally:
        for norm, value in zip(norms, collected, strict=True):
            norm.accumulate_stats = value
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, and the statistics of norms that change once per step."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        if isinstance(module, StepStatistics):
            yield from ((f"{name}.{kind}", buffer) for kind, buffer in module.named_buffers(recurse=False))


def _optimizer_state(state: TrainState) -> dict[str, Tensor]:
    """Return all tensors of the optimizer in its order, by the names of parameters and slots."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    return {
        f"{names[parameter]}.{slot}": value
        for parameter, slots in state.optimizer.state.items()
        for slot, value in slots.items()
        if isinstance(value, Tensor)
    }


def _averages(state: TrainState) -> dict[str, Tensor]:
    return {f"average of {name}": tensor for name, tensor in state.ema.tensors().items()}


def _words(tensor: Tensor) -> Words | None:
    """Return the memory of a tensor as 32-bit words; None for another device and for sizes that are not words."""
    if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() % 4 or not _is_dense(tensor):
        return None
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    words: Words = flat.view(torch.int32).numpy().view(np.uint32)
    return words


def _is_dense(tensor: Tensor) -> bool:
    formats = [torch.contiguous_format, *([torch.channels_last] if tensor.ndim == 4 else [])]
    return any(tensor.is_contiguous(memory_format=kind) for kind in formats)


def _device_checksum(tensor: Tensor) -> Tensor:
    words = tensor.detach().contiguous().flatten().view(torch.uint8 if tensor.element_size() % 4 else torch.int32)
    return words.sum(dtype=torch.int64) & 0xFFFFFFFF


def _find_difference(first: PassResults, second: PassResults) -> str | None:
    """Return the first result that differs in a bit."""
    for name, value in first.items():
        other = second[name]
        if value is None or other is None:
            if value is not other:
                return name
        elif not torch.equal(_bits(value), _bits(other)):
            return name
    return None


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits, in which NaN equals itself."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
