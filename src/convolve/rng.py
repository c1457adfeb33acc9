"""Random numbers as pure functions of a key: no state to save, and no dependence on the layout of a run.

The arithmetic: a key is any tuple of integers and strings, for example (seed, "order", epoch). Strings enter through
sha256. `hash_key` folds the parts with splitmix64, a 64-bit bijection with full avalanche:

    z = (x + 0x9E3779B97F4A7C15) mod 2^64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
    z = (z ^ z >> 27) * 0x94D049BB133111EB
    splitmix64(x) = z ^ z >> 31

`uniforms` hashes an array of counters (sample numbers, positions) under one key in the same way and keeps the top 53
bits, which gives doubles in [0, 1). The number of a counter does not depend on the other counters or on their order.

Random numbers of a sample are functions of (seed, epoch, sample), the order of samples is one of (seed, epoch), and
random layers key theirs by the position of the current pass, which `at` sets.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Key = int | str
Words = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _splitmix64(x: int) -> int:
    z = (x + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _word(part: Key) -> int:
    if isinstance(part, str):
        return int.from_bytes(hashlib.sha256(part.encode()).digest()[:8], "big")
    return part & _MASK


def hash_key(*key: Key) -> int:
    """Hash a key to 64 bits. A change of any part changes all bits."""
    state = 0
    for part in key:
        state = _splitmix64(state ^ _word(part))
    return state


def hash_counters(counters: npt.ArrayLike, *key: Key) -> Words:
    """Return 64 random bits for each counter under one key."""
    z = np.asarray(counters).astype(np.uint64) ^ np.uint64(hash_key(*key))
    with np.errstate(over="ignore"):
        z = z + np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    result: Words = z ^ (z >> np.uint64(31))
    return result


def uniforms(counters: npt.ArrayLike, *key: Key) -> npt.NDArray[np.float64]:
    """Return a double in [0, 1) for each counter under one key."""
    result: npt.NDArray[np.float64] = (hash_counters(counters, *key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def generator(*key: Key) -> np.random.Generator:
    """Return the numpy generator (Philox) of a key."""
    return np.random.Generator(np.random.Philox(key=hash_key(*key)))


class Position(NamedTuple):
    """A micro batch of a run; `first` is the index of its first sample in the global batch of the step."""

    seed: int
    step: int
    first: int


@dataclass
class _Pass:
    """A forward pass: its position, and how often each random layer has been called in it."""

    position: Position
    calls: dict[str, int] = field(default_factory=dict)


_pass: ContextVar[_Pass | None] = ContextVar("pass", default=None)


@contextmanager
def at(seed: int, step: int, first: int, calls: Mapping[str, int] | None = None) -> Iterator[None]:
    """Key the random layers of every forward pass inside to a micro batch. Nested uses shadow the outer one.

    Holds for the current thread. Code that runs a pass again in another thread, as a recomputation in the backward
    threads of an accelerator does, must read `position` and `calls` first and enter them again there.
    """
    token = _pass.set(_Pass(Position(seed, step, first), dict(calls or {})))
    try:
        yield
    finally:
        _pass.reset(token)


def position() -> Position | None:
    """Return the position that the enclosing `at` has set, or None."""
    current = _pass.get()
    return None if current is None else current.position


def calls() -> dict[str, int]:
    """Return how often each random layer that counts its calls was called since the enclosing `at`."""
    current = _pass.get()
    return dict(current.calls) if current else {}


def count_call(site: str) -> int:
    """Count a call of a random layer, and return how many came before it in this pass."""
    current = _pass.get()
    assert current is not None, f"{site}: random layer outside of a training pass"
    before = current.calls.get(site, 0)
    current.calls[site] = before + 1
    return before


_MAX_COUNT = 64


@dataclass(frozen=True)
class SampleRNG:
    """Random choices about samples in one epoch, keyed by sample, purpose, seed and epoch."""

    seed: int
    epoch: int

    def numbers(self, samples: npt.NDArray[np.int64], count: int, purpose: str) -> npt.NDArray[np.float64]:
        """Return `count` doubles in [0, 1) for each sample, as [N, count]."""
        assert count <= _MAX_COUNT, f"at most {_MAX_COUNT} numbers per sample and purpose"
        counters = samples[:, None] * _MAX_COUNT + np.arange(count)
        return uniforms(counters, self.seed, purpose, self.epoch)

    def flips(self, samples: npt.NDArray[np.int64], alternating: bool) -> npt.NDArray[np.bool_]:
        """Return which samples to flip: random ones in each epoch, or, alternating, each one in every second epoch."""
        if not alternating:
            return uniforms(samples, self.seed, "flip", self.epoch) < 0.5
        first = uniforms(samples, self.seed, "flip") < 0.5
        return np.logical_xor(first, bool(self.epoch & 1))


Indices = npt.NDArray[np.int64]


def epoch_permutation(seed: int, epoch: int, count: int) -> Indices:
    """Return the sample numbers of one epoch in random order."""
    return generator(seed, "order", epoch).permutation(count).astype(np.int64)
