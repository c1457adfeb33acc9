"""What convolve keeps in its cache folder, and how to remove it. Everything there can be made or fetched again.

A kind is a subfolder of the cache. An entry of `weights` or `datasets` is a folder, one of `features` or `engines` a
file; each of the other kinds is one entry.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from convolve import device
from convolve.errors import ConfigError, ConvolveError, suggest

KINDS = {
    "weights": "published weights",
    "features": "features of photographs",
    "datasets": "downloaded data sets",
    "indexes": "lists of image files",
    "scans": "checksums, sizes and duplicates of image files",
    "native": "compiled kernels",
    "inductor": "compiled exports",
    "engines": "exports for inference engines, and which engine is fastest",
}
_DIVIDED = ("weights", "features", "datasets", "engines")


@dataclass(frozen=True)
class CacheEntry:
    """A file or folder of the cache; `last_use` is in UTC."""

    kind: str
    name: str
    bytes: int
    last_use: datetime
    path: Path


def list_cache(kinds: Iterable[str] = KINDS) -> list[CacheEntry]:
    """Return the entries of the cache by kind, the most recently used first."""
    entries = []
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"--kind {kind}: unknown; {suggest(kind, KINDS)}")
        found = [_describe(kind, path) for path in _entry_paths(device.cache_folder() / kind, kind in _DIVIDED)]
        entries += sorted(found, key=lambda entry: (-entry.last_use.timestamp(), entry.name))
    return entries


def _entry_paths(root: Path, divided: bool) -> list[Path]:
    if not root.is_dir() or root.is_symlink():
        return []
    paths = [path for path in root.iterdir() if not path.is_symlink()]
    visible = [path for path in paths if not path.name.startswith(".") and path.suffix != ".lock"]
    return visible if divided else [root] * bool(visible)


def remove_entries(entries: Sequence[CacheEntry]) -> None:
    """Remove entries."""
    for entry in entries:
        try:
            if entry.path.is_dir():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
        except OSError as error:
            raise ConvolveError(f"{entry.path}: cannot remove ({error.strerror or error}); check its owner") from None


def find_entries(names: Sequence[str], entries: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Return the entries with these names; an unknown name is an error."""
    known = {entry.name for entry in entries}
    for name in names:
        if name not in known:
            raise ConfigError(f"cache remove {name}: not in the cache; {suggest(name, known or ['nothing'])}")
    return [entry for entry in entries if entry.name in names]


def _describe(kind: str, path: Path) -> CacheEntry:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    stats = [file.stat() for file in files]
    last = max((stat.st_mtime for stat in stats), default=path.stat().st_mtime)
    size = sum(stat.st_size for stat in stats)
    return CacheEntry(kind, _stored_name(path), size, datetime.fromtimestamp(last, timezone.utc), path)


def _stored_name(path: Path) -> str:
    """Return the name of weights as they are selected, such as `timm:resnet50.a1_in1k`."""
    try:
        name = json.loads((path / "weights.json").read_bytes())["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return path.name
    return name if isinstance(name, str) and name.isprintable() and name else path.name
