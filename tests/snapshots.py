"""Small snapshots that differ by one value, and checks of what a store holds after a fault."""

from pathlib import Path

import torch

from convolve.checkpoint.manifest import verify
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import Store


def make(step: int, value: float = 0.0) -> Snapshot:
    """Return all parts of a checkpoint, filled with the step or another value."""

    def part() -> dict[str, torch.Tensor]:
        return {"a": torch.full((30,), value or float(step)), "n": torch.tensor(step)}

    return Snapshot({"model": part(), "optimizer": part(), "averages": part()}, {"step": step, "seen": step * 64})


def value_of(snapshot: Snapshot) -> float:
    """Return the single value of all parts."""
    values = {float(part["a"][0]) for part in snapshot.tensors.values()}
    assert len(values) == 1, "parts of different snapshots are mixed"
    return values.pop()


def reopen(folder: Path) -> tuple[Store, float]:
    """Open the store as a restore does: the newest checkpoint loads without a warning, and no partial file remains."""
    store = Store.open(folder, keep=2)
    said: list[str] = []
    _, snapshot = store.newest(said.append)
    assert said == []
    for path in store.paths():
        verify(path)
    assert not [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]
    return store, value_of(snapshot)
