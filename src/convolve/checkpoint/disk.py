"""Writes that last: a file or folder is either there as a whole or not there at all, whatever stops the process."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from convolve.checkpoint.failpoint import failpoint


def write_synced(path: Path, data: bytes, stage: str) -> None:
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


def fill_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder with these files, in this order, and wait until the disk has all of it."""
    discard(path)
    path.mkdir()
    failpoint("temp-made")
    for name, data in files.items():
        write_synced(path / name, data, name)
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


def discard(path: Path) -> None:
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
