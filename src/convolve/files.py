"""Writes that last: a file or folder is either there as a whole or not there at all, whatever stops the process.

A place at each stage of a save where a test can kill the process.

With the environment variable `CONVOLVE_FAILPOINT=<stage>` the process sends itself SIGKILL the first time that stage is
reached, so that nothing can be tidied up, as with a power cut or an out-of-memory kill. Without it nothing happens. The
stages, in the order in which a save meets them:

    temp-made                   the private folder exists, it is empty
    wrote:<file>                a file has its bytes, not yet fsynced; once for each file, manifest.json last
    synced:<file>               the same file after fsync
    temp-synced                 the private folder is complete and fsynced, not yet renamed
    set-aside                   only when a step is replaced: the old folder has moved away
    renamed                     the new folder has its final name, the parent is not yet fsynced
    parent-synced               the rename will last
    verified                    the new checkpoint was read back and is whole, nothing is pruned yet
    withdrawn                   a folder to be removed has lost its name
    half-removed                some of its files are gone
    removed                     all of it is gone
    best-renamed                the mark of the best checkpoint is in place (wrote: and synced:best.txt come before)

One worker at a time in a folder, among all processes of a machine.

The lock belongs to an open file, so the system releases it when its holder ends, however it ends: nothing can go stale.
The holder's process number stands in the file for people who look.

Text files that hold whole lines only, and files that are replaced as a whole.
"""

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from convolve.errors import ConvolveError


def write_and_sync(path: Path, data: bytes, stage: str) -> None:
    """Write a new file and wait until the disk has it; `stage` names it to the failpoints."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        failpoint(f"wrote:{stage}")
        os.fsync(file.fileno())
    failpoint(f"synced:{stage}")


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder with these files, in this order, and wait until the disk has all of it."""
    remove_quietly(path)
    path.mkdir()
    failpoint("temp-made")
    for name, data in files.items():
        write_and_sync(path / name, data, name)
    sync_folder(path)
    failpoint("temp-synced")


def remove_folder(path: Path, withdrawn: Path) -> None:
    """Remove a folder so that no half of it is ever seen under its name: it first moves to `withdrawn`."""
    path.rename(withdrawn)
    failpoint("withdrawn")
    for child in sorted(withdrawn.iterdir()):
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
        failpoint("half-removed")
    withdrawn.rmdir()
    failpoint("removed")


def remove_quietly(path: Path) -> None:
    """Remove a private file or folder if that is possible; otherwise it stays behind its dot and is swept later."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def free_space(path: Path) -> str:
    """The room left on the disk that holds `path`, in words."""
    try:
        place = next(place for place in (path, *path.parents) if place.exists())
        return f"{shutil.disk_usage(place).free / 2**20:.1f} MiB"
    except OSError:
        return "unknown"


def is_running(pid: int) -> bool:
    """Whether another process with this number runs on this machine; this process does not count."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


VARIABLE = "CONVOLVE_FAILPOINT"


def failpoint(stage: str) -> None:
    """Kill this process if the environment asks for it at this stage."""
    if os.environ.get(VARIABLE) == stage:
        os.kill(os.getpid(), signal.SIGKILL)


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


class LineFile:
    """A text file to append to. A line is with the operating system when `write` returns, all of it or nothing.

    A last line without its end, left by a power cut, is cut off when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        repair_lines(path)
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _failure(path, error) from error

    @property
    def empty(self) -> bool:
        """Whether nothing was written yet, now or by an earlier process."""
        return os.fstat(self._file.fileno()).st_size == 0

    def write(self, line: str) -> None:
        """Append one line; line ends inside it become spaces."""
        rest = memoryview((" ".join(line.splitlines()) + "\n").encode())
        size = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), size)
            raise _failure(self.path, error) from error

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()


def repair_lines(path: Path) -> None:
    """Cut off a last line that has no end."""
    try:
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _failure(path, error) from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader finds the old content or the new, never a part."""
    temp = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with temp.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except OSError as error:
        raise _failure(path, error) from error
    finally:
        temp.unlink(missing_ok=True)


def _failure(path: Path, error: OSError) -> ConvolveError:
    return ConvolveError(f"{path}: cannot be written ({error.strerror}); make room or choose another --log-dir")
