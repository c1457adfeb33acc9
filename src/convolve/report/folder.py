"""The run folder: one for each run, and never one for two."""

import re
from pathlib import Path

from convolve.config import RunConfig
from convolve.errors import ConfigError

_CLAIM = ".claimed"


def claim_run_folder(config: RunConfig, name: str) -> Path:
    """Make the folder of a new run and return it.

    `--run-dir` is taken exactly, and must be absent or empty. Otherwise it is <log-dir>/<name>-<number>[-<suffix>] with
    the number after the highest one that is there. Processes that ask at the same time never get the same one.
    """
    try:
        if config.run_dir is not None:
            return _claim_exactly(config.run_dir)
        _check_name("config name", name)
        if config.name_suffix is not None:
            _check_name("--name-suffix", config.name_suffix)
        return _claim_next(config.log_dir, name, config.name_suffix)
    except OSError as error:
        given = f"--run-dir {config.run_dir}" if config.run_dir is not None else f"--log-dir {config.log_dir}"
        raise ConfigError(
            f"{given}: cannot make a run folder ({error.strerror}); choose a folder to write in"
        ) from error


def _claim_exactly(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if any(folder.iterdir()):
            raise FileExistsError
        (folder / _CLAIM).touch(exist_ok=False)
    except FileExistsError:
        raise ConfigError(
            f"--run-dir {folder}: the folder is not empty; go on with its run by `convolve restore {folder}`, "
            "or choose another folder"
        ) from None
    return folder


def _claim_next(parent: Path, name: str, suffix: str | None) -> Path:
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
