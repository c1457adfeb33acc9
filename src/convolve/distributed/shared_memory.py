"""Adding up over the processes of one host through memory that they share.

For a small network a message through a socket costs more than the work. Here every process owns a slot in one mapped
file: it writes its part and raises its turn number; once all turns are up, everybody adds all slots in the order of
ranks, so all processes have the same bits. Two sets of slots alternate, so nobody can overwrite what a slower process
still reads.

    process r, turn t:   slots[t % 2][r] := part;  turns[r] := t
                         wait until all turns >= t
                         sum := slots[t % 2][0] + ... + slots[t % 2][n - 1]

A turn begins only when the one before is finished, so a process that is two turns ahead cannot exist: it would have
waited for the others in between.
"""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from convolve.errors import ParallelError

TIMEOUT_SECONDS = 300.0
SPINS = 2000


class SharedMemoryAllReduce:
    """Sums flat float32 tensors of up to `capacity` elements over two or more processes of one host."""

    def __init__(self, path: Path, rank: int, world: int, capacity: int) -> None:
        self._rank, self._world, self._turn = rank, world, 0
        self._finish: Callable[[], None] = _noop
        head, slots = 64 * world, 2 * world * capacity * 4
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), head + slots)
        # One cache line for each process: its turn number and its process id.
        lines = np.frombuffer(memory, np.int64, 8 * world)
        self._turns, self._pids = lines[::8], lines[1::8]
        self._pids[rank] = os.getpid()
        self._slots = np.frombuffer(memory, np.float32, 2 * world * capacity, head).reshape(2, world, capacity)

    @staticmethod
    def create(path: Path, world: int, capacity: int) -> None:
        """Make the file; by one process, before the others open it."""
        with path.open("wb") as file:
            os.truncate(file.fileno(), 64 * world + 2 * world * capacity * 4)

    def __call__(self, flat: Tensor) -> Callable[[], None]:
        """Offer a part; the returned call waits for the others and leaves the sum in `flat`. So does the next offer."""
        self._finish()
        self._turn += 1
        turn = self._turn
        # numpy, since its calls cost a fraction of torch's, and a small network has little else to pay for.
        own, slots = flat.numpy(), self._slots[turn % 2, :, : flat.numel()]
        slots[self._rank] = own
        self._turns[self._rank] = turn

        def finish() -> None:
            if self._finish is not finish:
                return  # a later offer has done it
            self._finish = _noop
            self._wait(turn)
            np.add(slots[0], slots[1], out=own)
            for rank in range(2, self._world):
                np.add(own, slots[rank], out=own)

        self._finish = finish
        return finish

    def _wait(self, turn: int) -> None:
        deadline = time.perf_counter() + TIMEOUT_SECONDS
        spins = 0
        while int(self._turns.min()) < turn:
            spins += 1
            if spins > SPINS:
                time.sleep(5e-5)
                self._require_alive(turn)
                if time.perf_counter() > deadline:
                    late = int(self._turns.argmin())
                    raise ParallelError(
                        f"rank {late} has not answered for {TIMEOUT_SECONDS:.0f} s; it is gone or stuck"
                    )

    def _require_alive(self, turn: int) -> None:
        """A process that died never answers; whoever waits for it ends at once."""
        for rank in np.flatnonzero(self._turns < turn).tolist():
            try:
                os.kill(int(self._pids[rank]), 0)
            except ProcessLookupError:
                raise ParallelError(f"rank {rank} is gone; go on with `convolve restore`") from None


def _noop() -> None:
    """No turn is open."""
