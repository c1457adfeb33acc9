"""Findings of the data check of a run, read back from its folder with the images that a report shows."""

import csv
import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from convolve.data.image_io import Images, read_image
from convolve.data.inspect import KINDS, WRONG_LABEL
from convolve.errors import ConvolveError
from convolve.files import read_run_file
from convolve.report.content import CheckedImage, DataChecks
from convolve.report.opening import SHOWN_IMAGES
from convolve.run_files import DATA_CHECKS_FILE

_SIDE = 192


def read_checks(folder: Path, data_dir: object) -> DataChecks | None:
    """Return the findings in a run folder; None if its data was not checked.

    Only images inside of the run's data folder are opened: a run folder from elsewhere cannot name any others.
    """
    try:
        text = read_run_file(folder / DATA_CHECKS_FILE).decode("utf-8", "replace")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except (OSError, ConvolveError, csv.Error):
        return None
    root = Path(data_dir).resolve() if isinstance(data_dir, str) else None
    kinds = Counter(row.get("kind") for row in rows)
    wrong = [row for row in rows if row.get("kind") == WRONG_LABEL]
    wrong.sort(key=lambda row: -(_number(row.get("probability")) or 0.0))
    leaks = [row for row in rows if row.get("across") == "yes"]
    return DataChecks(
        {kind: kinds[kind] for kind in KINDS if kinds[kind]},
        tuple(_read_suspect(row, root, shown=number < SHOWN_IMAGES) for number, row in enumerate(wrong)),
        tuple(_read_pair(row, root, shown=2 * number < SHOWN_IMAGES) for number, row in enumerate(leaks)),
    )


def _read_suspect(row: Mapping[str, str | None], root: Path | None, *, shown: bool) -> CheckedImage:
    return CheckedImage(
        row.get("path") or "",
        row.get("label") or "",
        row.get("split") or "",
        _read_thumbnail(row.get("path"), root) if shown else None,
        row.get("suggestion") or "",
        _number(row.get("probability")),
    )


def _read_pair(row: Mapping[str, str | None], root: Path | None, *, shown: bool) -> tuple[CheckedImage, CheckedImage]:
    """Return an image and the one that it duplicates, which is listed by its path only."""
    other = row.get("other") or ""
    pixels = _read_thumbnail(other, root) if shown else None
    folder = Path(other).parent
    copy = CheckedImage(other, folder.name, folder.parent.name, pixels)
    return _read_suspect(row, root, shown=shown), copy


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _read_thumbnail(name: str | None, root: Path | None) -> Images | None:
    """Return a small version of an image in `root`; None if it is gone, broken or elsewhere."""
    if not name or root is None:
        return None
    try:
        path = Path(name).resolve()
        if not path.is_relative_to(root):
            return None
        pixels = read_image(path, channels=3)
    except (ConvolveError, OSError, ValueError):
        return None
    scale = min(1.0, _SIDE / max(pixels.shape[:2]))
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX), np.uint8)
