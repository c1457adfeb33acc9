"""One run's checkpoints, in a folder: saved as a whole or not at all, pruned only when the new one is proven.

A save fills a private folder beside the final one, waits for the disk, renames, waits again, reads all of it back, and
only then removes older ones. Folders that are not checkpoints yet, or no longer, have names that begin with a dot:

    .tmp-<step>-<pid>     being written
    .old-<step>-<pid>     set aside while a checkpoint of the same step takes its place
    .gone-<step>-<pid>    being removed

What a dead process left of these is put right when a store is opened. One process writes to a store at a time.

Checkpoints that are written while training goes on.

The state is copied at once, which is cheap; a thread of its own encodes and writes it, waits for the disk and reads it
back. There is one save under way at most, so checkpoints appear in order and memory for one copy is enough. A kill
loses the save under way, as it would have lost the steps since the one before; what is there is whole.
"""

import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from convolve.checkpoint.manifest import encode_manifest, read_files, verify
from convolve.checkpoint.snapshot import FILES, Snapshot, decode, describe_mismatch, encode
from convolve.errors import CheckpointError
from convolve.files import (
    failpoint,
    free_space,
    is_running,
    remove_folder,
    remove_quietly,
    sync_folder,
    write_and_sync,
    write_folder,
)
from convolve.run_files import (
    BEST_FILE,
    CHECKPOINTS_FOLDER,
    MANIFEST_FILE,
    checkpoint_name,
    is_checkpoint_name,
    step_of,
)

MIN_KEPT = 2
_LEFTOVER = re.compile(r"\.(tmp|old|gone)-(\w+)-(\d+)")


class Store:
    """The checkpoints folder of one run.

    Args:
        folder: made at the first save.
        keep: newest checkpoints that stay, two at least, besides the best one; None keeps all.
    """

    def __init__(self, folder: Path, *, keep: int | None) -> None:
        self.folder = folder
        self.keep = None if keep is None else max(keep, MIN_KEPT)
        self._damaged: set[Path] = set()
        self._sweep()
        _ = self.best

    @property
    def best(self) -> Path | None:
        """The checkpoint that was marked best, if there is one."""
        return find_best(self.folder)

    def paths(self) -> list[Path]:
        """Checkpoints that look complete, ascending by step."""
        return _list_checkpoints(self.folder)

    def save(self, snapshot: Snapshot) -> Path:
        """Store a snapshot and return its folder; one of the same step is replaced, or left alone if it is equal."""
        files = encode(snapshot)
        files[MANIFEST_FILE] = encode_manifest(files)
        path = self.folder / checkpoint_name(snapshot.step)
        if not _has_checkpoints(path, files[MANIFEST_FILE]):
            self._write(path, files)
        self._damaged.discard(path)
        self._prune(path)
        return path

    def newest(self, announce: Callable[[str], object]) -> tuple[Path, Snapshot]:
        """The newest checkpoint that is whole. Each damaged one on the way is named through `announce`."""
        paths = self.paths()
        for path in reversed(paths):
            try:
                return path, load(path)
            except CheckpointError as error:
                self._damaged.add(path)
                announce(f"{error}; the checkpoint before it is tried")
        found = f"none of its {len(paths)} checkpoints is whole" if paths else "there is no checkpoint in it"
        raise CheckpointError(f"{self.folder}: {found}; start again with `convolve train`")

    def mark_best(self, path: Path) -> None:
        """Mark a checkpoint as the best by validation; pruning never removes it."""
        if path.parent.resolve() != self.folder.resolve() or path.name not in {known.name for known in self.paths()}:
            raise CheckpointError(f"{path}: is no checkpoint of {self.folder}, and cannot be its best")
        temp = self._private("tmp", "best")
        try:
            remove_quietly(temp)
            write_and_sync(temp, f"{path.name}\n".encode(), BEST_FILE)
            temp.replace(self.folder / BEST_FILE)
            failpoint("best-renamed")
            sync_folder(self.folder)
        except OSError as error:
            raise self._failure("the mark of the best checkpoint", error, len(path.name)) from error
        finally:
            remove_quietly(temp)

    def _write(self, path: Path, files: dict[str, bytes]) -> None:
        temp = self._private("tmp", path.name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_folder(temp, files)
            self._swap_in(temp, path)
        except OSError as error:
            raise self._failure(path.name, error, sum(map(len, files.values()))) from error
        finally:
            remove_quietly(temp)
        verify(path)
        failpoint("verified")

    def _swap_in(self, temp: Path, path: Path) -> None:
        """Give a complete folder its final name; what had it before is removed last, or comes back on failure."""
        aside = self._private("old", path.name)
        replaces = path.exists()
        if replaces:
            remove_quietly(aside)
            path.rename(aside)
            failpoint("set-aside")
        try:
            temp.rename(path)
        except OSError:
            if replaces:
                aside.rename(path)
            raise
        failpoint("renamed")
        sync_folder(self.folder)
        failpoint("parent-synced")
        remove_quietly(aside)

    def _prune(self, saved: Path) -> None:
        """Remove what is older than the newest `keep`; those known to be damaged neither count nor go."""
        if self.keep is None:
            return
        older = [path for path in self.paths() if step_of(path) < step_of(saved) and path not in self._damaged]
        surplus = older[: max(0, len(older) - (self.keep - 1))]
        best = self.best
        for path in surplus:
            if path != best:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        withdrawn = self._private("gone", path.name)
        try:
            remove_quietly(withdrawn)
            remove_folder(path, withdrawn)
        except OSError as error:
            raise CheckpointError(
                f"{path}: the old checkpoint cannot be removed ({error.strerror}); all checkpoints are safe; "
                "make its folder writable, or keep all by leaving out --keep-checkpoints"
            ) from error

    def _sweep(self) -> None:
        if not self.folder.is_dir():
            return
        for entry in sorted(self.folder.iterdir()):
            match = _LEFTOVER.fullmatch(entry.name)
            if match and not is_running(int(match[3])):
                self._put_right(entry, match[1], match[2])

    def _put_right(self, entry: Path, kind: str, step: str) -> None:
        """Restore a folder that was set aside if nothing took its place; remove everything else."""
        final = self.folder / checkpoint_name(int(step)) if kind == "old" and step.isdigit() else None
        if final is None or final.exists():
            remove_quietly(entry)
            return
        try:
            entry.rename(final)
        except OSError as error:
            raise CheckpointError(
                f"{entry}: cannot be renamed to {final.name} ({error.strerror}); make the folder writable"
            ) from error

    def _private(self, kind: str, name: str) -> Path:
        return self.folder / f".{kind}-{name.removeprefix('step-').lstrip('0') or '0'}-{os.getpid()}"

    def _failure(self, what: str, error: OSError, size: int) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}: cannot save {what}: {error.strerror} ({size / 2**20:.1f} MiB needed, "
            f"{free_space(self.folder)} free); make room or choose another --log-dir; earlier checkpoints are intact"
        )


def load(path: Path) -> Snapshot:
    """The snapshot in one checkpoint folder, after every file was compared with its manifest."""
    _reject(path)
    return decode(path, dict(read_files(path)))


def find(path: Path) -> list[Path]:
    """The checkpoints that a path means, ascending: those of a run or checkpoints folder, or the one itself."""
    _reject(path)
    if (path / MANIFEST_FILE).is_file() or is_checkpoint_name(path.resolve().name):
        return [path]
    found = _list_checkpoints(path / CHECKPOINTS_FOLDER) or _list_checkpoints(path)
    if not found:
        raise CheckpointError(f"{path}: there is no checkpoint in it; give a run folder or one of its checkpoints")
    return found


def find_best(folder: Path) -> Path | None:
    """The checkpoint in a checkpoints folder that was marked best, if there is one; changes nothing there."""
    mark = folder / BEST_FILE
    try:
        name = mark.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{mark}: cannot be read ({error}); delete it to go on without") from None
    if not is_checkpoint_name(name):
        raise CheckpointError(f"{mark}: {name[:40]!r} is no checkpoint's name; delete the file to go on without")
    path = folder / name
    return path if path.is_dir() else None


def _reject(path: Path) -> None:
    """Only folders can be checkpoints; a file gets told what it is, by its first bytes, without being loaded."""
    if path.is_dir():
        return
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such folder; give a run folder or one of its checkpoints")
    if path.name in (*FILES, MANIFEST_FILE):
        raise CheckpointError(f"{path}: is one file of a checkpoint; give its folder, {path.parent}")
    try:
        with path.open("rb") as file:
            foreign = describe_mismatch(file.read(8), path.suffix.lower())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give a run folder") from error
    what = (
        f"is {foreign}; pickles can run code and are never loaded" if foreign else "is a file, not a checkpoint folder"
    )
    raise CheckpointError(f"{path}: {what}; give a run folder or one of its checkpoints")


def _list_checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    complete = (path for path in folder.iterdir() if is_checkpoint_name(path.name) and (path / MANIFEST_FILE).is_file())
    return sorted(complete, key=step_of)


def _has_checkpoints(path: Path, manifest: bytes) -> bool:
    """Whether this folder is whole and has exactly this manifest, hence exactly these files."""
    try:
        verify(path)
        return (path / MANIFEST_FILE).read_bytes() == manifest
    except (CheckpointError, OSError):
        return False


class AsyncSaver:
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
