"""The run folder: one for each run, and never one for two.

A run folder belongs to one training at a time: two of them would prune and overwrite each other's checkpoints.

`convolve launch`: a training over many hosts, started from one of them and watched until it is done.

The curves of runs in a folder, read while they grow. Names from clients are looked up, never joined to a path.

A training from its config to its report: `train` begins one, `restore` goes on with one.

`convolve train`: a new run.

`convolve restore`: go on with a run exactly where it stopped.
"""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from convolve.config import Config, RunConfig
from convolve.config.loading import parse
from convolve.distributed.collectives import Collectives
from convolve.errors import CheckpointError, ConfigError, ConvolveError, ParallelError
from convolve.files import hold_lock
from convolve.loggers.files import Points, read_points
from convolve.run_files import CONFIG_FILE, LOCK_FILE, SUMMARY_FILE, TRAINING_FILE, VALIDATION_FILE


def create_run_dir(config: RunConfig, name: str) -> Path:
    """Make the folder of a new run and return it.

    `--run-dir` is taken exactly, and must be absent or empty. Otherwise it is <log-dir>/<name>-<number>[-<suffix>] with
    the number after the highest one that is there. Processes that ask at the same time never get the same one.
    """
    try:
        if config.run_dir is not None:
            return _create_exactly(config.run_dir)
        _check_name("config name", name)
        if config.name_suffix is not None:
            _check_name("--name-suffix", config.name_suffix)
        return _create_next(config.log_dir, name, config.name_suffix)
    except OSError as error:
        given = f"--run-dir {config.run_dir}" if config.run_dir is not None else f"--log-dir {config.log_dir}"
        raise ConfigError(
            f"{given}: cannot make a run folder ({error.strerror}); choose a folder to write in"
        ) from error


def _create_exactly(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if any(folder.iterdir()):
            raise FileExistsError
        (folder / LOCK_FILE).touch(exist_ok=False)
    except FileExistsError:
        raise ConfigError(
            f"--run-dir {folder}: the folder is not empty; go on with its run by `convolve restore {folder}`, "
            "or choose another folder"
        ) from None
    return folder


def _create_next(parent: Path, name: str, suffix: str | None) -> Path:
    """The name without suffix is the claim: whoever makes it and then sees nobody else with its number has it."""
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


def _check_name(what: str, given: str) -> None:
    if not re.fullmatch(r"[\w.+=@-]+", given) or set(given) == {"."}:
        raise ConfigError(f"{what} {given!r}: must be part of a folder's name; use letters, digits and . _ - + = @")


# Processes of a job that has just been ended may need a moment to leave; a restart after them is no user's mistake.
LOCK_TIMEOUT_SECONDS = 10.0


@contextmanager
def lock_run(folder: Path, team: Collectives) -> Iterator[None]:
    """Hold a run folder while the block runs; all processes of a team end with one line where another one has it.

    The system lets go of it when the holder ends, however it ends. A disk without locks cannot tell, and is believed.
    """
    with ExitStack() as stack:
        refusal = team.broadcast_str(_try_lock(folder, stack) if team.is_rank_zero else "")
        if refusal:
            raise ParallelError(refusal)
        yield


def _try_lock(folder: Path, stack: ExitStack) -> str:
    """Take the folder until the stack is closed; otherwise why that cannot be."""
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS

    def waiting() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    try:
        stack.enter_context(hold_lock(folder / LOCK_FILE, waiting))
    except TimeoutError:
        return (
            f"{folder}: process {_read_holder(folder)} is training in this run folder; "
            "let it end, or train in another folder"
        )
    except OSError as error:
        return f"{folder}: cannot be written ({error.strerror}); make the run folder writable to train in it"
    return ""


def _read_holder(folder: Path) -> str:
    try:
        return (folder / LOCK_FILE).read_text(encoding="utf-8").strip() or "unknown"
    except OSError:
        return "unknown"


def reserve_run_dir(config: Config) -> Path:
    """The folder of a run that is not there yet, decided before any process starts, so that a restart finds it."""
    return (config.run.run_dir or create_run_dir(config.run, config.name)).absolute()


MAX_POINTS = 400
MAX_RUNS = 200


def list_runs(parent: Path) -> dict[str, Path]:
    """Runs by name, those that were written to last first."""
    try:
        found = [path for path in parent.iterdir() if (path / TRAINING_FILE).is_file()]
    except OSError:
        return {}
    found.sort(key=lambda path: (path / TRAINING_FILE).stat().st_mtime, reverse=True)
    return {path.name: path for path in found[:MAX_RUNS]}


def read_run(folder: Path) -> dict[str, Any]:
    """Loss, accuracy, rate and speed of one run, in few enough points to draw."""
    training, validation = folder / TRAINING_FILE, folder / VALIDATION_FILE
    columns = {
        "loss": (training, "loss"),
        "accuracy": (training, "accuracy"),
        "validation_loss": (validation, "loss"),
        "validation_accuracy": (validation, "accuracy"),
        "learning_rate": (training, "learning_rate"),
        "images_per_second": (training, "images_per_second"),
    }
    curves: dict[str, Points] = {}
    for name, (path, column) in columns.items():
        try:
            points = read_points(path, column)
        except ConvolveError:
            points = []  # a line is being written at this moment
        curves[name] = points[:: max(1, -(-len(points) // MAX_POINTS))] + points[-1:]
    finished = (folder / SUMMARY_FILE).is_file()
    return {"name": folder.name, "finished": finished, "curves": curves}


def read_config(folder: Path) -> Config:
    """Return the resolved config of a run."""
    try:
        return parse((folder / CONFIG_FILE).read_text(encoding="utf-8"), str(folder / CONFIG_FILE))
    except OSError:
        raise CheckpointError(
            f"{folder}: not a run folder ({CONFIG_FILE} is missing); give the folder that `convolve train` printed"
        ) from None
