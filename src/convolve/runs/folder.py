"""The run folder: create, lock, list and read. A run folder belongs to one run, and one job trains in it at a time."""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from convolve.config import Config, RunConfig
from convolve.config.loading import read_saved
from convolve.directory import UnsafeFileError
from convolve.distributed.collectives import Collectives
from convolve.errors import CheckpointError, ConfigError, ConvolveError, DataError, ParallelError
from convolve.files import describe_write_error, hold_lock, read_run_file, remove_quietly
from convolve.label_scores import MEAN_AVERAGE_PRECISION
from convolve.loggers.files import Points, read_points
from convolve.run_files import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    LOCK_FILE,
    SUMMARY_FILE,
    TRAINING_FILE,
    VALIDATION_FILE,
)


def create_run_dir(config: RunConfig, name: str) -> Path:
    """Create the folder of a new run and return it.

    `--run-dir` is used as given, and must be absent or empty. The default is <log-dir>/<name>-<number>[-<suffix>]
    with the number after the highest existing one. Concurrent processes never get the same folder.
    """
    try:
        if config.run_dir is not None:
            return _create_exactly(config.run_dir, claimed=config.resume)
        _check_name("config name", name)
        if config.name_suffix is not None:
            _check_name("--name-suffix", config.name_suffix)
        return _create_next(config.log_dir, name, config.name_suffix)
    except OSError as error:
        option = f"--run-dir {config.run_dir}" if config.run_dir is not None else f"--log-dir {config.log_dir}"
        raise ConfigError(
            f"{option}: cannot create a run folder ({error.strerror}); choose a writable folder"
        ) from error


@contextmanager
def discard_failed_start(folder: Path, collectives: Collectives) -> Iterator[None]:
    """Remove the folder of a new run if the block fails before the run has begun.

    Nothing is lost if the folder is empty, or if data or options are wrong before the first log point and the first
    checkpoint. Runs that were interrupted or have diverged stay.
    """
    try:
        yield
    except BaseException as error:
        wrong = isinstance(error, ConfigError | DataError)
        if collectives.is_rank_zero and not (_has_begun(folder) if wrong else _has_files(folder)):
            remove_quietly(folder)
        raise


def _has_files(folder: Path) -> bool:
    try:
        return not {entry.name for entry in folder.iterdir()} <= {LOCK_FILE}
    except OSError:
        return True


def _has_begun(folder: Path) -> bool:
    """Return whether a run has a checkpoint or a log point; a folder that cannot be read may have one."""
    try:
        return any((folder / CHECKPOINTS_FOLDER).glob("*")) or bool(read_points(folder / TRAINING_FILE, "step"))
    except (OSError, ConvolveError):
        return True


def _create_exactly(folder: Path, *, claimed: bool) -> Path:
    """Create a folder that is absent or empty; if `claimed`, also one of a run that ended before it wrote anything."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if {entry.name for entry in folder.iterdir()} - ({LOCK_FILE} if claimed else set()):
            raise FileExistsError
        (folder / LOCK_FILE).touch(exist_ok=claimed)
    except FileExistsError:
        raise ConfigError(
            f"--run-dir {folder}: folder is not empty; resume its run with `convolve restore {folder}`, "
            "or choose another folder"
        ) from None
    return folder


def _create_next(parent: Path, name: str, suffix: str | None) -> Path:
    """Reserve a number by creating the name without suffix; it is ours if no other folder has the number."""
    parent.mkdir(parents=True, exist_ok=True)
    number = max(_numbers(parent, name), default=0)
    while True:
        number += 1
        claim = parent / f"{name}-{number}"
        try:
            claim.mkdir()
        except FileExistsError:
            continue
        if _numbers(parent, name).count(number) == 1:
            return claim if suffix is None else claim.rename(parent / f"{claim.name}-{suffix}")
        claim.rmdir()


def _numbers(parent: Path, name: str) -> list[int]:
    pattern = re.compile(rf"{re.escape(name)}-(\d+)(-.*)?")
    return [int(match[1]) for entry in parent.iterdir() if (match := pattern.fullmatch(entry.name))]


def _check_name(subject: str, name: str) -> None:
    if not re.fullmatch(r"[\w.+=@-]+", name) or set(name) == {"."}:
        raise ConfigError(f"{subject} {name!r}: not valid in a folder name; use letters, digits and . _ - + = @")


# Processes of a job that was just stopped may need a moment to exit before a restart gets the lock.
LOCK_TIMEOUT_SECONDS = 10.0


@contextmanager
def lock_run(folder: Path, collectives: Collectives) -> Iterator[None]:
    """Lock a run folder inside the block; all ranks raise if another job has the lock.

    The system releases the lock when the process ends, even if it is killed. File systems without locks are trusted.
    """
    with ExitStack() as stack:
        problem = collectives.broadcast_str(_try_lock(folder, stack) if collectives.is_rank_zero else "")
        if problem:
            raise ParallelError(problem)
        yield


def _try_lock(folder: Path, stack: ExitStack) -> str:
    """Lock the folder until the stack is closed. Return the problem, empty if there is none."""
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS

    def waiting() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    try:
        stack.enter_context(hold_lock(folder / LOCK_FILE, waiting))
    except TimeoutError:
        return (
            f"{folder}: run folder is locked by process {_read_holder(folder)}; "
            "wait for it to finish or use another folder"
        )
    except UnsafeFileError as error:
        return describe_write_error(folder / LOCK_FILE, error)
    except OSError as error:
        return f"{folder}: cannot write ({error.strerror}); make the run folder writable"
    return ""


def _read_holder(folder: Path) -> str:
    try:
        return read_run_file(folder / LOCK_FILE).decode().strip() or "unknown"
    except OSError:
        return "unknown"


def has_started(config: Config) -> bool:
    """Return whether `--run-dir` has a run already."""
    return config.run.run_dir is not None and (config.run.run_dir / CONFIG_FILE).is_file()


def reserve_run_dir(config: Config) -> Path:
    """Return the folder of a new run, created before any process starts so a restart finds it."""
    return (config.run.run_dir or create_run_dir(config.run, config.name)).absolute()


MAX_POINTS = 400
MAX_RUNS = 200


def list_runs(parent: Path) -> dict[str, Path]:
    """Return runs by name, the most recently written first."""
    try:
        found = [path for path in parent.iterdir() if (path / TRAINING_FILE).is_file()]
    except OSError:
        return {}
    found.sort(key=lambda path: (path / TRAINING_FILE).stat().st_mtime, reverse=True)
    return {path.name: path for path in found[:MAX_RUNS]}


def read_run(folder: Path) -> dict[str, Any]:
    """Return the curves of one run, thinned to at most MAX_POINTS points each."""
    training, validation = folder / TRAINING_FILE, folder / VALIDATION_FILE
    columns = {
        "loss": (training, "loss"),
        "accuracy": (training, "accuracy"),
        "validation_loss": (validation, "loss"),
        "validation_accuracy": (validation, "accuracy"),
        f"validation_{MEAN_AVERAGE_PRECISION}": (validation, MEAN_AVERAGE_PRECISION),
        "learning_rate": (training, "learning_rate"),
        "images_per_second": (training, "images_per_second"),
    }
    curves: dict[str, Points] = {}
    for name, (path, column) in columns.items():
        try:
            points = read_points(path, column)
        except ConvolveError:
            points = []  # no such column, or a line is being written at this moment
        curves[name] = points[:: max(1, -(-len(points) // MAX_POINTS))] + points[-1:]
    finished = (folder / SUMMARY_FILE).is_file()
    return {"name": folder.name, "finished": finished, "curves": curves}


def read_config(folder: Path) -> Config:
    """Return the resolved config of a run."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: not a run folder ({CONFIG_FILE} is missing); give the folder that `convolve train` printed"
        )
    return read_saved(path)
