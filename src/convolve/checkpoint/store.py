"""Checkpoints of one run: atomic save, verification, pruning, the best one, and saving in the background.

A save writes a folder atomically (see `files.py`), reads it back, and only then prunes older checkpoints. The processes
of one run write to a store at a time: each writes its tensors to the same draft, and rank 0 adds the manifest and gives
the draft its name after all others have flushed and read back theirs. `Store.open` recovers from killed writers.

`AsyncSaver` copies the state into the bytes to store, which is cheap, and a thread writes them while training
continues. At most one save is in progress, so checkpoints appear in order and one copy of the state is enough. SIGKILL
loses the save in progress; finished checkpoints stay intact.
"""

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from convolve.checkpoint.manifest import (
    FileEntry,
    compare_written,
    describe_files,
    encode_entries,
    read_files,
    read_manifest,
    read_slices,
    verify,
)
from convolve.checkpoint.ranks import ALONE, Ranks
from convolve.checkpoint.snapshot import Snapshot, WantsFn, decode, describe_mismatch, encode, is_checkpoint_file
from convolve.directory import UnsafeFileError
from convolve.errors import CheckpointError
from convolve.files import (
    FolderDraft,
    describe_write_error,
    failpoint,
    open_folder,
    read_run_file,
    recover,
    remove_folder,
    replace_file,
)
from convolve.run_files import (
    BEST_FILE,
    CHECKPOINTS_FOLDER,
    MANIFEST_FILE,
    STATE_FILE,
    checkpoint_name,
    is_checkpoint_name,
    step_of,
)

MIN_KEPT = 2


class Store:
    """The checkpoints folder of one run, created by the first save.

    Args:
        keep: number of newest checkpoints to keep besides the best one, at least 2; None keeps all.
        ranks: the processes that call `open`, `save`, `load` and `newest` together.
    """

    def __init__(self, folder: Path, *, keep: int | None, ranks: Ranks = ALONE) -> None:
        self.folder = folder
        self.ranks = ranks
        self.keep = None if keep is None else max(keep, MIN_KEPT)
        self._damaged: set[Path] = set()

    @classmethod
    def open(cls, folder: Path, *, keep: int | None, ranks: Ranks = ALONE) -> "Store":
        """Open a store to write to: clean up after killed writers and check that best.txt is valid."""
        ranks.together(lambda: _clean(folder) if ranks.rank == 0 else None)
        return cls(folder, keep=keep, ranks=ranks)

    @property
    def best(self) -> Path | None:
        """Checkpoint that is marked best, or None."""
        return find_best(self.folder)

    def paths(self) -> list[Path]:
        """Return the complete checkpoints in order of their steps."""
        return _list_checkpoints(self.folder)

    def save(self, snapshot: Snapshot) -> Path:
        """Save a snapshot and return its folder; a checkpoint of the same step is replaced unless it is identical."""
        path = self.folder / checkpoint_name(snapshot.step)
        draft = FolderDraft(path, self.ranks.owner)
        try:
            written = self.ranks.together(lambda: self._write(draft, snapshot))
            own = json.dumps(describe_files(written), default=vars)
            entries = [json.loads(text) for text in self.ranks.exchange(own)]
            if self.ranks.rank == 0:
                files = {name: FileEntry(**entry) for named in entries for name, entry in named.items()}
                self._publish(draft, files, written)
        finally:
            if self.ranks.rank == 0:
                draft.discard()
        return path

    def _write(self, draft: FolderDraft, snapshot: Snapshot) -> dict[str, bytes]:
        """Write the files of this process to a draft and return them."""
        files = encode(snapshot)
        if self.ranks.rank:
            del files[STATE_FILE]
        if files:
            _write_files(draft, files)
        if self.ranks.rank:
            compare_written(draft.folder, files)
        return files

    def _publish(self, draft: FolderDraft, entries: dict[str, FileEntry], written: dict[str, bytes]) -> None:
        """Complete a draft to which all processes have written, and prune older checkpoints."""
        path = draft.path
        if not _is_identical(path, encode_entries(entries)):
            _require_files(draft, entries)
            _write_files(draft, {MANIFEST_FILE: encode_entries(entries)}, publish=True)
            read_manifest(path)
            compare_written(path, written)
            failpoint("verified")
        self._damaged.discard(path)
        self._prune(path)

    def load(self, path: Path, wants: WantsFn = lambda part, name: True) -> Snapshot:
        """Load the wanted tensors of a checkpoint that is intact; if it is not, all processes raise CheckpointError.

        One process of each host reads all of it and compares it with the manifest. Then every process reads the tensors
        that it wants, which the system still has in its page cache.
        """
        self.ranks.together(lambda: verify(path) if self.ranks.leads_host else None)
        return self.ranks.together(lambda: decode(path, dict(read_slices(path, wants))))

    def newest(
        self, announce: Callable[[str], object], wants: WantsFn = lambda part, name: True
    ) -> tuple[Path, Snapshot]:
        """Return the newest intact checkpoint with the wanted tensors; announce each damaged one that is newer."""
        names = self.ranks.exchange("\n".join(path.name for path in self.paths()))[0].split()
        paths = [self.folder / name for name in names]
        for path in reversed(paths):
            try:
                return path, self.load(path, wants)
            except CheckpointError as error:
                self._damaged.add(path)
                announce(f"{error}; trying the previous checkpoint")
        problem = f"none of its {len(paths)} checkpoints is intact" if paths else "contains no checkpoint"
        raise CheckpointError(f"{self.folder}: {problem}; start again with `convolve train`")

    def mark_best(self, path: Path) -> None:
        """Mark a checkpoint as the best by validation; pruning never removes it."""
        if path.parent.resolve() != self.folder.resolve() or path.name not in {known.name for known in self.paths()}:
            raise CheckpointError(f"{path}: not a checkpoint of {self.folder}, so it cannot be its best")
        mark, data = self.folder / BEST_FILE, f"{path.name}\n".encode()
        try:
            replace_file(mark, data)
        except OSError as error:
            raise _save_error(mark, error, len(data)) from error

    def _prune(self, saved: Path) -> None:
        """Remove checkpoints older than the newest `keep`; damaged ones are neither counted nor removed.

        One that contains anything but the files of a checkpoint stays as it is.
        """
        if self.keep is None:
            return
        older = [path for path in self.paths() if step_of(path) < step_of(saved) and path not in self._damaged]
        surplus = older[: max(0, len(older) - (self.keep - 1))]
        best = self.best
        for path in surplus:
            if path != best:
                _remove(path)


class AsyncSaver:
    """Saves snapshots to a store in a background thread; the interpreter exits only after the last save."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def save(self, snapshot: Snapshot, *, best: bool) -> None:
        """Copy a snapshot and start to save it, marked as best on request. The previous save must have been polled."""
        assert self._pending is None, "one save at a time"
        self._pending = self._thread.submit(self._save, snapshot.copy(), best)

    def poll(self, *, wait: bool) -> Path | None:
        """Return the path of the last save once it completes, else None. Re-raises the error of a failed save."""
        future = self._pending
        if future is None or not (wait or future.done()):
            return None
        self._pending = None
        return future.result()

    def _save(self, snapshot: Snapshot, best: bool) -> Path:
        path = self._store.save(snapshot)
        if best and self._store.ranks.rank == 0:
            self._store.mark_best(path)
        return path


def load(path: Path) -> Snapshot:
    """Load one checkpoint folder after comparing every file with its manifest."""
    _require_folder(path)
    return decode(path, dict(read_files(path)))


def load_state(path: Path) -> dict[str, Any]:
    """Return the plain values of a checkpoint whose files are intact, without its tensors."""
    verify(path)
    return decode(path, dict(read_slices(path, lambda part, name: False))).state


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a run or checkpoints folder in order of their steps; a checkpoint returns itself."""
    _require_folder(path)
    if (path / MANIFEST_FILE).is_file() or is_checkpoint_name(path.resolve().name):
        return [path]
    paths = _list_checkpoints(path / CHECKPOINTS_FOLDER) or _list_checkpoints(path)
    if not paths:
        raise CheckpointError(f"{path}: contains no checkpoint; give a run folder or one of its checkpoints")
    return paths


def choose_checkpoint(path: Path) -> Path:
    """Return the checkpoint to use: `path` if it is one, else the run's best by validation, else its newest."""
    paths = find_checkpoints(path)
    if len(paths) == 1:
        return paths[0]
    return find_best(paths[-1].parent) or paths[-1]


def find_best(folder: Path) -> Path | None:
    """Return the checkpoint in a checkpoints folder that is marked best, or None; read-only."""
    mark = folder / BEST_FILE
    try:
        name = read_run_file(mark).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{mark}: cannot read ({error}); delete the file to continue without it") from None
    if not is_checkpoint_name(name):
        raise CheckpointError(
            f"{mark}: {name[:40]!r} is not the name of a checkpoint; delete the file to continue without it"
        )
    path = folder / name
    return path if path.is_dir() else None


def _require_folder(path: Path) -> None:
    """Raise unless `path` is a folder; a file is identified by its first bytes, without loading it."""
    if path.is_dir():
        return
    if not path.is_file():
        raise CheckpointError(f"{path}: no such folder; give a run folder or one of its checkpoints")
    if is_checkpoint_file(path.name):
        raise CheckpointError(f"{path}: one file of a checkpoint; give its folder, {path.parent}")
    try:
        with path.open("rb") as file:
            mismatch = describe_mismatch(file.read(8), path.suffix.lower())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read ({error.strerror}); give a run folder") from error
    problem = f"is {mismatch}; pickles can run code and are never loaded" if mismatch else "is a file, not a folder"
    raise CheckpointError(f"{path}: {problem}; give a run folder or one of its checkpoints")


def _list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder; a link among them is an error, it may lead to other data."""
    try:
        with open_folder(folder) as entries:
            names = [name for name in entries.names() if is_checkpoint_name(name) and entries.has_folder(name)]
    except UnsafeFileError as error:
        raise CheckpointError(
            f"{folder}: {error.strerror}; replace the link with the folder it points to, or remove it"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot list ({error.strerror}); check the disk and the permissions"
        ) from error
    complete = (folder / name for name in names if (folder / name / MANIFEST_FILE).is_file())
    return sorted(complete, key=step_of)


def _is_identical(path: Path, manifest: bytes) -> bool:
    """Return True if this checkpoint is intact and has this manifest, hence the same files."""
    try:
        verify(path)
        return read_run_file(path / MANIFEST_FILE) == manifest
    except (CheckpointError, OSError):
        return False


def _write_files(draft: FolderDraft, files: dict[str, bytes], *, publish: bool = False) -> None:
    try:
        draft.write(files)
        if publish:
            draft.publish()
    except OSError as error:
        raise _save_error(draft.path, error, sum(map(len, files.values()))) from error


def _require_files(draft: FolderDraft, entries: dict[str, FileEntry]) -> None:
    """Raise CheckpointError unless this process has the files of all processes."""
    for name, entry in entries.items():
        file = draft.folder / name
        if not file.is_file() or file.stat().st_size != entry.size:
            raise CheckpointError(
                f"{draft.path}: {name}, written by another process, is not in the folder of rank 0; give all hosts the "
                "same run folder, as on a shared file system"
            )


def _clean(folder: Path) -> None:
    """Clean up after killed writers, and check that best.txt is valid."""
    try:
        recover(folder, _recovered_name)
    except OSError as error:
        raise CheckpointError(describe_write_error(folder, error)) from error
    find_best(folder)


def _recovered_name(name: str) -> str:
    """Version 0.1 set a checkpoint aside under its step alone."""
    return checkpoint_name(int(name)) if name.isdigit() else name


def _remove(path: Path) -> None:
    try:
        remove_folder(path, is_checkpoint_file)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot remove the old checkpoint ({error.strerror}); make its folder writable, or keep all "
            "checkpoints by omitting --keep-checkpoints; no other checkpoint is affected"
        ) from error


def _save_error(path: Path, error: OSError, size: int) -> CheckpointError:
    return CheckpointError(f"{describe_write_error(path, error, size)}; earlier checkpoints are intact")
