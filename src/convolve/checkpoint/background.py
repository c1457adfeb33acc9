"""Checkpoints that are written while training goes on.

The state is copied at once, which is cheap; a thread of its own encodes and writes it, waits for the disk and reads it
back. There is one save under way at most, so checkpoints appear in order and memory for one copy is enough. A kill
loses the save under way, as it would have lost the steps since the one before; what is there is whole.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import Store


class BackgroundSaver:
    """Puts snapshots into a store, one after the other. The interpreter does not end before the last one is there."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Path] | None = None

    def begin(self, snapshot: Snapshot, *, best: bool) -> None:
        """Copy a snapshot and start to store it, marked as the best if it is; the one before must be finished."""
        assert self._under_way is None, "one save at a time"
        self._under_way = self._thread.submit(self._save, _copy(snapshot), best)

    def finished(self, *, wait: bool) -> Path | None:
        """The checkpoint that was begun last, told once it is there; if its save failed, this raises why."""
        future = self._under_way
        if future is None or not (wait or future.done()):
            return None
        self._under_way = None
        return future.result()

    def _save(self, snapshot: Snapshot, best: bool) -> Path:
        path = self._store.save(snapshot)
        if best:
            self._store.mark_best(path)
        return path


def _copy(snapshot: Snapshot) -> Snapshot:
    """The same, out of reach of the next step."""

    def keep(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    return Snapshot({part: keep(tensors) for part, tensors in snapshot.tensors.items()}, dict(snapshot.state))
