"""Crash-safe files and folders: atomic writes, a lock, sha256, failpoints.

A file or folder written here exists completely or not at all, even after SIGKILL or a power cut. It is filled under a
private name beside its final one, flushed to disk and renamed, and then the rename is flushed too. Private names start
with a dot and end with the process id of the writer:

    .tmp-<name>-<token>-<pid>   being written
    .old-<name>-<pid>           set aside while a new folder takes its name
    .gone-<name>-<pid>          being removed

`recover` restores or removes what killed processes left.

Run folders may come from someone else. Nothing here writes, reads or deletes through a symbolic link in a run folder,
opens a FIFO or a device, or changes a file that has other names; see `directory.py`.

Failpoints test this. With the environment variable `CONVOLVE_FAILPOINT=<stage>` the process sends itself SIGKILL the
first time it reaches that stage, so no cleanup runs. Stages of an atomic file and of an atomic folder, in order:

    wrote:<file>, synced:<file>, renamed:<file>
    temp-made                   the private folder exists and is empty
    wrote:<file>, synced:<file> once for each file
    temp-synced                 the private folder is complete and flushed
    set-aside                   only if a folder is replaced: the old one has a private name
    renamed                     the new folder has its final name
    parent-synced               the rename is flushed
    verified                    (checkpoints) the new folder was read back, nothing is pruned yet
    withdrawn, half-removed, removed    a folder lost its name, then some files, then all of them
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from convolve.directory import Directory, UnsafeFileError, open_regular
from convolve.errors import CheckpointError, ConvolveError
from convolve.run_files import SUBFOLDERS

FAILPOINT_VARIABLE = "CONVOLVE_FAILPOINT"
_LEFTOVER = re.compile(r"\.(tmp|old|gone)-(.+)-(\d+)")
_CHUNK_BYTES = 1 << 20
_LOCK_POLL_SECONDS = 0.1
_SAFE_REMEDY = "runs contain only regular files and folders; replace it with a copy, or remove it"
_LOCK_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)


@contextmanager
def open_folder(path: Path) -> Iterator[Directory]:
    """Open a folder inside the block. Only folders that users name may be links: not those that runs create."""
    follow = path.name not in SUBFOLDERS and not path.name.startswith(".tmp-")
    with Directory.open(path, follow=follow) as folder:
        yield folder


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the path of a draft to write; it replaces `path` when the block ends, and is removed if the block fails.

    The draft has the name of `path`, in a private folder beside it, because some writers read or store the file name.
    """
    folder = path.with_name(_draft_name(path))
    try:
        with open_folder(path.parent) as parent:
            parent.mkdir(folder.name, 0o700)
        draft = folder / path.name
        yield draft
        failpoint(f"wrote:{path.name}")
        publish(draft, path)
    finally:
        remove_quietly(folder)


def publish(draft: Path, path: Path) -> None:
    """Give a complete file its final name; a reader finds the old content or the new, even after a power cut."""
    with open_folder(draft.parent) as source, open_folder(path.parent) as target:
        # Windows flushes only files that are open for writing.
        descriptor = source.open_file(draft.name, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _rename_file(source, draft.name, target, path.name)


def write_file(path: Path, data: bytes, raises: type[ConvolveError] = ConvolveError) -> None:
    """Write a file atomically; on failure raise an error of type `raises`."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise raises(describe_write_error(path, error)) from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically; a link of this name is replaced, its target is not changed."""
    draft = _draft_name(path)
    with open_folder(path.parent) as folder:
        try:
            _create_file(folder, draft, data, path.name)
            _rename_file(folder, draft, folder, path.name)
        finally:
            _remove(folder, draft)


def draft_owner() -> str:
    """Return the end of the private names of this process, which no other draft has."""
    return f"{secrets.token_hex(4)}-{os.getpid()}"


def _draft_name(path: Path, owner: str = "") -> str:
    return f".tmp-{path.name}-{owner or draft_owner()}"


def _create_file(folder: Directory, name: str, data: bytes, stage: str) -> None:
    """Write a new file and flush it; `stage` is its name in failpoints."""
    descriptor = folder.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        failpoint(f"wrote:{stage}")
        os.fsync(descriptor)


def _rename_file(source: Directory, draft: str, target: Directory, name: str) -> None:
    failpoint(f"synced:{name}")
    source.rename(draft, name, target)
    failpoint(f"renamed:{name}")
    target.sync()


class FolderDraft:
    """A folder that gets its name once it is complete. Processes that use the same `owner` write to the same draft."""

    def __init__(self, path: Path, owner: str = "") -> None:
        self.path = path
        self.folder = path.with_name(_draft_name(path, owner))

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write these files in this order and flush them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open_folder(self.path.parent) as parent:
            with suppress(FileExistsError):
                parent.mkdir(self.folder.name)
            failpoint("temp-made")
            with parent.open_folder(self.folder.name) as folder:
                for name, data in files.items():
                    _create_file(folder, name, data, name)
                    failpoint(f"synced:{name}")
                folder.sync()

    def publish(self) -> None:
        """Give the draft its name; a folder that has it is replaced atomically."""
        failpoint("temp-synced")
        with open_folder(self.path.parent) as parent:
            _swap_in(parent, self.folder.name, self.path.name)

    def discard(self) -> None:
        """Remove the draft, if it has not been published."""
        with suppress(OSError), open_folder(self.path.parent) as parent:
            _remove(parent, self.folder.name)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make `path` a folder with these files, written in this order; a folder that exists is replaced atomically."""
    draft = FolderDraft(path)
    try:
        draft.write(files)
        draft.publish()
    finally:
        draft.discard()


def _swap_in(parent: Directory, draft: str, name: str) -> None:
    """Give a complete folder its final name; the folder that had it is removed last, or restored on failure."""
    aside = f".old-{name}-{os.getpid()}"
    replaces = parent.has_folder(name)
    if replaces:
        _remove(parent, aside)
        parent.rename(name, aside)
        failpoint("set-aside")
    try:
        parent.rename(draft, name)
    except OSError:
        if replaces:
            parent.rename(aside, name)
        raise
    failpoint("renamed")
    parent.sync()
    failpoint("parent-synced")
    _remove(parent, aside)


def remove_folder(path: Path, belongs: Callable[[str], bool]) -> bool:
    """Remove a folder that contains only files whose names belong to it; otherwise change nothing and return False.

    It first gets a private name, so it is never seen incomplete under its final one.
    """
    withdrawn = f".gone-{path.name}-{os.getpid()}"
    with open_folder(path.parent) as parent, parent.open_folder(path.name) as folder:
        entries = folder.names()
        if not all(map(belongs, entries)) or any(map(folder.has_folder, entries)):
            return False
        _remove(parent, withdrawn)
        parent.rename(path.name, withdrawn)
        failpoint("withdrawn")
        for name in entries:
            folder.unlink(name)
            failpoint("half-removed")
        parent.rmdir(withdrawn)
        failpoint("removed")
    return True


def _remove(parent: Directory, name: str) -> None:
    """Remove a private file or folder of files; on failure the rest stays under its private name for `recover`."""
    with suppress(OSError):
        if not stat.S_ISDIR(parent.stat(name).st_mode):
            parent.unlink(name)
            return
        with parent.open_folder(name) as folder:
            for entry in folder.names():
                folder.unlink(entry)
        parent.rmdir(name)


def remove_quietly(path: Path) -> None:
    """Remove a private file or folder of this process, ignoring failures."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def recover(folder: Path, final_name: Callable[[str], str] = str) -> None:
    """Clean up after killed writers: restore a folder set aside if none took its place, remove all other leftovers.

    Args:
        folder: leftovers of running processes, except this one, are kept.
        final_name: returns the name to restore, given the one inside the private name.
    """
    if not folder.is_dir() and not folder.is_symlink():
        return
    with open_folder(folder) as parent:
        taken = set(parent.names())
        for name in sorted(taken):
            match = _LEFTOVER.fullmatch(name)
            if match is None or _is_other_process(int(match[3])):
                continue
            final = final_name(match[2])
            if match[1] == "old" and final not in taken and stat.S_ISDIR(parent.stat(name).st_mode):
                parent.rename(name, final)
                taken.add(final)
            else:
                _remove(parent, name)


def _is_other_process(pid: int) -> bool:
    """Return True if another process with this id is running on this machine."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def open_run_file(path: Path) -> BinaryIO:
    """Open a file of a run folder to read it; raise CheckpointError for links, FIFOs and devices."""
    try:
        with open_folder(path.parent) as folder:
            return os.fdopen(folder.open_file(path.name, os.O_RDONLY), "rb")
    except UnsafeFileError as error:
        raise CheckpointError(f"{path}: cannot read ({error.strerror}); {_SAFE_REMEDY}") from None


def read_run_file(path: Path) -> bytes:
    """Return the content of a file of a run folder."""
    with open_run_file(path) as file:
        return file.read()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal, in constant memory."""
    with open_regular(path) as file:
        return sha256_of(file)


def sha256_of(file: BinaryIO) -> str:
    """Return the sha256 of an open file in hexadecimal, in constant memory."""
    digest, chunk = hashlib.sha256(), bytearray(_CHUNK_BYTES)
    while count := file.readinto(chunk):  # type: ignore[attr-defined]
        digest.update(memoryview(chunk)[:count])
    return digest.hexdigest()


def has_content(file: BinaryIO, data: bytes) -> bool:
    """Return True if the rest of an open file is `data`; uses constant memory."""
    chunk, view, position = bytearray(_CHUNK_BYTES), memoryview(data), 0
    while count := file.readinto(chunk):  # type: ignore[attr-defined]
        found = chunk if count == len(chunk) else chunk[:count]
        if found != view[position : position + count]:
            return False
        position += count
    return position == len(data)


def describe_write_error(path: Path, error: OSError, needed: int | None = None) -> str:
    """Return the message for a failed write; with `needed` bytes it includes the free disk space."""
    reason = error.strerror or str(error)
    if isinstance(error, UnsafeFileError):
        return f"{path}: cannot write ({reason}); {_SAFE_REMEDY}"
    if needed is not None:
        reason += f"; {needed / 2**20:.1f} MiB needed, {_free_space(path)} free"
    return f"{path}: cannot write ({reason}); free disk space or fix permissions"


def _free_space(path: Path) -> str:
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        return f"{shutil.disk_usage(existing).free / 2**20:.1f} MiB"
    except OSError:
        return "unknown"


def failpoint(stage: str) -> None:
    """Kill this process if the environment requests it at this stage."""
    if os.environ.get(FAILPOINT_VARIABLE) == stage:
        os.kill(os.getpid(), signal.SIGKILL)


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
def hold_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[bool]:
    """Hold a lock among all processes of this machine; call `on_wait` repeatedly until it is free.

    The system releases the lock when its holder exits, so it cannot go stale. The file contains the holder's process
    id, for people. Yields False if the file system has no locks; the caller must then use unique names.
    """
    with open_folder(path.parent) as folder:
        descriptor = folder.open_file(path.name, os.O_RDWR | os.O_CREAT | os.O_APPEND, single=True)
    with os.fdopen(descriptor, "a+") as file:
        locked = _lock(file, on_wait)
        if locked:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield locked


def _lock(file: IO[str], on_wait: Callable[[], None]) -> bool:
    while True:
        try:
            _try_lock(file)
            return True
        except OSError as error:
            if error.errno not in _LOCK_HELD:
                return False
        on_wait()
        time.sleep(_LOCK_POLL_SECONDS)
