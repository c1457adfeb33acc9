"""Torch's, numpy's and Python's global generators under a key.

Code that is not convolve's draws from global generators. A pass of such code runs inside `keyed_generators`, which
seeds all three by a key and restores them afterwards. So its draws depend on the key alone, a restored run draws the
same numbers, and the states that the caller had stay as they were. `capture` and `replay` repeat a part of a pass, for
recomputation.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convolve.layers.hooks import bookkeeping
from convolve.rng import Key, hash_key

_CPU = torch.device("cpu")
_keyed_device: ContextVar[torch.device | None] = ContextVar("keyed_device", default=None)


@dataclass(frozen=True)
class GeneratorStates:
    """States of the global generators of the CPU and of one device."""

    device: torch.device
    torch_state: Tensor
    device_state: Tensor | None
    numpy_state: Any
    python_state: Any

    @classmethod
    def read(cls, device: torch.device) -> "GeneratorStates":
        """Return the current states."""
        with bookkeeping():
            other = None if device.type in ("cpu", "meta") else torch.get_device_module(device).get_rng_state(device)
            return cls(device, torch.get_rng_state(), other, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Set the generators back to these states."""
        with bookkeeping():
            torch.set_rng_state(self.torch_state)
            if self.device_state is not None:
                torch.get_device_module(self.device).set_rng_state(self.device_state, self.device)
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)

    def drawn(self) -> str | None:
        """Return whose generator has been drawn from since: torch's, numpy's or Python's; None if none has."""
        now = GeneratorStates.read(self.device)
        same_device = self.device_state is None or torch.equal(self.device_state, now.device_state)  # type: ignore[arg-type]
        if not (torch.equal(self.torch_state, now.torch_state) and same_device):
            return "torch"
        if self.python_state != now.python_state:
            return "Python"
        _, before, *others = self.numpy_state
        _, after, *others_now = now.numpy_state
        return None if np.array_equal(before, after) and others == others_now else "numpy"


@contextmanager
def keyed_generators(*key: Key, device: torch.device = _CPU) -> Iterator[None]:
    """Seed the global generators by a key inside the block, and restore their states afterwards."""
    before, seed = GeneratorStates.read(device), hash_key(*key)
    token = _keyed_device.set(device)
    try:
        torch.manual_seed(seed >> 1)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        yield
    finally:
        _keyed_device.reset(token)
        before.restore()


def capture() -> GeneratorStates | None:
    """Return the states of the generators, or None outside of `keyed_generators`."""
    device = _keyed_device.get()
    return None if device is None else GeneratorStates.read(device)


@contextmanager
def replay(states: GeneratorStates | None) -> Iterator[None]:
    """Run the block from captured states, and restore the current ones afterwards; None changes nothing."""
    if states is None:
        yield
        return
    before = GeneratorStates.read(states.device)
    token = _keyed_device.set(states.device)
    try:
        states.restore()
        yield
    finally:
        _keyed_device.reset(token)
        before.restore()
