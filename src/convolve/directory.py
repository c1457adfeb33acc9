"""Access to the entries of a folder through its descriptor, without following links.

A run folder may come from someone else, who can put links, FIFOs and devices in place of its files. A `Directory` opens
entries relative to the descriptor of the folder, never through a symbolic link, and only regular files. Systems without
such calls (`os.supports_dir_fd`) use paths; each entry is checked before it is opened. `private_folder` makes a folder
that no other user can write to or replace.
"""

import errno
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from convolve.errors import ConvolveError

_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_CALLS = {os.open, os.mkdir, os.rename, os.unlink, os.rmdir, os.stat}
HAS_DESCRIPTORS = os.supports_dir_fd >= _CALLS and os.listdir in os.supports_fd
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"),
)


class UnsafeFileError(OSError):
    """An entry is a link, a FIFO, a socket or a device; `strerror` names the entry."""


class Directory:
    """An open folder; all methods take names of its entries."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, follow: bool) -> Iterator["Directory"]:
        """Open a folder inside the block; `follow` permits that the path itself is a symbolic link."""
        if not follow:
            _check_kind(path.name, os.lstat(path))
        if not HAS_DESCRIPTORS:
            yield cls(path, None)
            return
        descriptor = os.open(path, _FOLDER_FLAGS | (0 if follow else os.O_NOFOLLOW))
        try:
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def open_folder(self, name: str) -> Iterator["Directory"]:
        """Open a folder in this one inside the block."""
        _check_kind(name, self.stat(name))
        if self._descriptor is None:
            yield Directory(self.path / name, None)
            return
        descriptor = os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=self._descriptor)
        try:
            yield Directory(self.path / name, descriptor)
        finally:
            os.close(descriptor)

    def open_file(self, name: str, flags: int, *, single: bool = False) -> int:
        """Return the descriptor of a regular file; `single` rejects files that have other names (hard links)."""
        # Before: opening a device can have an effect. After: the entry may have been exchanged in between.
        with suppress(FileNotFoundError):
            _check_file(name, self.stat(name), single)
        descriptor = os.open(self._at(name), flags | _FLAGS, 0o666, dir_fd=self._descriptor)
        try:
            _check_file(name, os.fstat(descriptor), single)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path if self._descriptor is None else self._descriptor))

    def stat(self, name: str) -> os.stat_result:
        return os.stat(self._at(name), dir_fd=self._descriptor, follow_symlinks=False)

    def has_folder(self, name: str) -> bool:
        """Return True if a folder has this name, False if the name is free; raise for anything else that is unsafe."""
        try:
            found = self.stat(name)
        except FileNotFoundError:
            return False
        _check_kind(name, found)
        return stat.S_ISDIR(found.st_mode)

    def mkdir(self, name: str, mode: int = 0o777) -> None:
        os.mkdir(self._at(name), mode, dir_fd=self._descriptor)

    def rename(self, name: str, new_name: str, target: "Directory | None" = None) -> None:
        """Rename an entry, into another folder on request; an entry of that name is replaced, never followed."""
        target = target or self
        os.replace(self._at(name), target._at(new_name), src_dir_fd=self._descriptor, dst_dir_fd=target._descriptor)

    def unlink(self, name: str) -> None:
        os.unlink(self._at(name), dir_fd=self._descriptor)

    def rmdir(self, name: str) -> None:
        os.rmdir(self._at(name), dir_fd=self._descriptor)

    def sync(self) -> None:
        """Wait until the disk has the names in the folder; Windows, which opens no folders, has no such call."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def _at(self, name: str) -> str:
        return name if self._descriptor is not None else str(self.path / name)


def _check_kind(name: str, found: os.stat_result) -> None:
    for matches, kind in _KINDS:
        if matches(found.st_mode):
            raise UnsafeFileError(0, f"{name} is {kind}")


def _check_file(name: str, found: os.stat_result, single: bool) -> None:
    _check_kind(name, found)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if single and found.st_nlink > 1:
        raise UnsafeFileError(0, f"{name} is a hard link")


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file to read; anything else, such as a FIFO, which would block, or a device, is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path) -> bytes:
    """Return the contents of a regular file."""
    with open_regular(path) as file:
        return file.read()


def private_folder(root: Path, name: str) -> Path:
    """Return the folder `name` of `root` after checking that no other user can put anything in it or in its place.

    Every folder from it up to / must belong to root or this user and be writable by its owner only. A sticky folder
    such as /tmp is accepted if the next one belongs to this user with mode 0700. Missing folders are created with mode
    0700; `root` and `name` get it if they belong to this user and others can write to them. Links are followed first:
    use the path that is returned.
    """
    folder, sticky = Path(os.path.realpath(root / name)), False
    if sys.platform == "win32":
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for part in (*reversed(folder.parents), folder):
        if not os.path.lexists(part):
            with suppress(FileExistsError):
                part.mkdir(mode=0o700)
        status = part.lstat()
        owners = (os.geteuid(),) if sticky else (0, os.geteuid())
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in owners:
            raise ConvolveError(f"{part}: not a folder of this user; set CONVOLVE_CACHE to one that is")
        forbidden = 0o077 if sticky else 0o022
        sticky = part != folder and bool(status.st_mode & stat.S_ISVTX and status.st_mode & 0o022)
        if sticky or not status.st_mode & forbidden:
            continue
        if part not in (folder, Path(os.path.realpath(root))) or status.st_uid != os.geteuid():
            remedy = f"run `chmod go-{'rwx' if forbidden == 0o077 else 'w'} {part}` or set CONVOLVE_CACHE"
            problem = "can write there" if status.st_mode & 0o022 else f"can read it, and {part.parent} is open to all"
            raise ConvolveError(f"{part}: other users {problem}; {remedy}")
        part.chmod(0o700)
    return folder


def find_intact(folder: Path, name: str, suffix: str) -> Path | None:
    """Return an intact file `name-SHA256suffix` of this user in a private folder; remove all others of this name."""
    for path in sorted(folder.glob(f"{name}-*{suffix}")):
        if _is_intact(path):
            return path
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
    return None


def _is_intact(path: Path) -> bool:
    """Compare a file with the sha256 in its name: mapping a truncated library would end the process with SIGBUS.

    Another user may have put it here before the folder was private, so its owner is checked too. From here on only
    this user can change the file.
    """
    try:
        # Neither a link nor a pipe, which would wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            private = status.st_uid == os.geteuid() and not status.st_mode & 0o022
            if not (private and stat.S_ISREG(status.st_mode)):
                return False
            return hashlib.sha256(file.read()).hexdigest() == path.stem.rpartition("-")[2]
    except OSError:
        return False
