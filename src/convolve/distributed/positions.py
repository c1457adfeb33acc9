"""Where each rank of a run is: its step, and what it is doing there.

Every rank publishes its position in the rendezvous store every few seconds, from a thread, so a step only assigns
attributes. If a collective times out, the ranks that still wait can report where the others were last seen.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch._C._distributed_c10d import Store

PUBLISH_SECONDS = 2.0
COMPUTING = "computing"


class Positions:
    """The position of this rank. A single process has no others to report."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._activity = COMPUTING

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Mark what this rank waits for inside the block; after an error the mark stays."""
        before, self._activity = self._activity, activity
        yield
        self._activity = before

    def __str__(self) -> str:
        step = "setup" if self.step is None else f"step {self.step}"
        return f"{step}, {self._activity}"

    def describe_others(self) -> str:
        """Return the last positions of the other ranks."""
        return ""


class PublishedPositions(Positions):
    """Positions of all ranks, exchanged through the store in which they met."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        super().__init__()
        self._store, self._rank, self._world = store.clone(), rank, world  # type: ignore[attr-defined]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="publish-position", daemon=True)

    def start(self) -> None:
        """Start to publish."""
        self._thread.start()

    def close(self) -> None:
        """Stop publishing. Call before the store is closed."""
        self._closed.set()
        self._thread.join()

    def describe_others(self) -> str:
        others = [rank for rank in range(self._world) if rank != self._rank]
        return "; ".join(f"rank {rank} was last at {self._read(rank)}" for rank in others)

    def _read(self, rank: int) -> str:
        with suppress(RuntimeError):
            if self._store.check([_key(rank)]):
                return str(self._store.get(_key(rank)), "utf-8")
        return "an unknown position"

    def _publish(self) -> None:
        published = ""
        # A store that is gone takes its last positions with it; the collectives report the lost connection.
        with suppress(RuntimeError):
            while not self._closed.wait(PUBLISH_SECONDS):
                current = str(self)
                if current != published:
                    self._store.set(_key(self._rank), current)
                    published = current


def _key(rank: int) -> str:
    return f"convolve/position/{rank}"
