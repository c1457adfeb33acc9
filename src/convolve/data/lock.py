"""One worker at a time in a folder, among all processes of a machine.

The lock belongs to an open file, so the system releases it when its holder ends, however it ends: nothing can go stale.
The holder's process number stands in the file for people who look.
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_POLL_SECONDS = 0.1
_BUSY = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: IO[str]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _try_lock(file: IO[str]) -> None:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def hold_lock(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock while the block runs; `waiting` is called again and again until it is free.

    Yields False where the file system has no locks: the caller must then use names of its own.
    """
    with path.open("a+") as file:
        locked = _lock(file, waiting)
        if locked:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield locked


def _lock(file: IO[str], waiting: Callable[[], None]) -> bool:
    while True:
        try:
            _try_lock(file)
            return True
        except OSError as error:
            if error.errno not in _BUSY:
                return False
        waiting()
        time.sleep(_POLL_SECONDS)
