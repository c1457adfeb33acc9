"""WebDataset tars: the members of one sample are adjacent and have the same name up to its first dot.

Nothing is unpacked: the index has the offset of each image (`tar_members.py`).
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from convolve.data.dataset import Skipped
from convolve.data.readers.index import Index, index_shards
from convolve.directory import read_regular
from convolve.download import Progress
from convolve.errors import DataError

METADATA = "metadata.json"
_LARGEST_METADATA = 1 << 26
_SHARD_NUMBER = re.compile(r"-\d+$")
_TRAIN, _TEST = ("train",), ("validation", "val", "valid", "test")


def find_shards(root: Path) -> tuple[list[Path], list[Path]] | None:
    """Return the tars of the two splits; tars with other names only are all for training."""
    tars = sorted(root.glob("*.tar"))
    if not tars:
        return None
    train, test = ([tar for tar in tars if _split_name(tar) in names] for names in (_TRAIN, _TEST))
    return (train, test) if train and test else (tars, [])


def unused_shards(root: Path, used: Iterable[Path]) -> tuple[Skipped, ...]:
    """Return the tars that belong to neither split."""
    unused = sorted(set(root.glob("*.tar")) - set(used))
    return (("tar of no split", len(unused), unused[0].name),) if unused else ()


def _split_name(path: Path) -> str:
    return _SHARD_NUMBER.sub("", path.stem)


def read_metadata(root: Path) -> dict[str, Any]:
    """Return the contents of `metadata.json`; empty if there is none."""
    path = root / METADATA
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _LARGEST_METADATA:
            raise ValueError("it is too large")
        metadata = json.loads(read_regular(path))
        if not isinstance(metadata, dict):
            raise ValueError("it must be an object")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot read ({error}); get an undamaged copy") from error
    return metadata


def index_tars(root: Path, shards: list[Path], split: str, progress: Progress) -> Index:
    """Index the samples of one split in the order of the shards."""
    return index_shards(root, shards, f"tar {split}", "tar", progress)


def require_length(root: Path, split: str, count: int) -> None:
    """Raise DataError if the metadata announce another number of samples: a shard is missing, or one too many."""
    announced = read_metadata(root).get(f"{split}_length")
    if isinstance(announced, int) and announced != count:
        raise DataError(f"{root}: {count} samples of {split}, {METADATA} announces {announced}; get a complete copy")
