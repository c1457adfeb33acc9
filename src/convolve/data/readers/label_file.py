"""Labels from a table: `labels.csv` with the columns `file,label[,label...][,split]`.

Files are relative to the folder of the table; a missing suffix is added. Without a heading, the first column is the
file, and the last cell of each line is its split if all of them are names of splits. If one image has several labels,
any image may have any number of them, also none.
"""

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from convolve.data.dataset import Task
from convolve.data.readers.annotations import LABEL_FILE
from convolve.data.readers.image_folder import TEST_NAMES, TRAIN_NAMES, VALIDATION_NAMES, index_files
from convolve.data.readers.index import Index, load_or_build, signature
from convolve.data.readers.locations import EXTENSIONS, SkippedEntries
from convolve.directory import read_regular
from convolve.errors import DataError

_FILE_HEADINGS = ("file", "filename", "file_name", "image", "path", "id", "image_id", "name")
_LABEL_HEADINGS = ("label", "labels", "class", "category", "target")
_SPLIT_OF = {
    **dict.fromkeys(TRAIN_NAMES, "train"),
    **dict.fromkeys(VALIDATION_NAMES, "validation"),
    **dict.fromkeys(TEST_NAMES, "test"),
}


@dataclass(frozen=True)
class Row:
    """One line of a table; `split` is train, validation or test, empty if the table has no such column."""

    line: int
    file: str
    labels: tuple[str, ...]
    split: str = ""


@dataclass(frozen=True)
class LabelFile:
    """A table of labels, and its classes in order. `task` is single-label or multi-label."""

    path: Path
    rows: tuple[Row, ...]
    classes: tuple[str, ...]
    task: Task = "single-label"

    @property
    def splits(self) -> set[str]:
        """Return the splits that occur."""
        return {row.split for row in self.rows}


def find_label_file(root: Path) -> Path | None:
    """Return the table of a data folder, or the path itself if it is a table."""
    if root.is_file() and root.suffix.lower() == ".csv":
        return root
    path = root / LABEL_FILE
    return path if path.is_file() else None


def read_label_file(path: Path, task: str = "auto") -> LabelFile:
    """Read and check a table of labels; by default, several labels of one image make it multi-label."""
    try:
        text = read_regular(path).decode("utf-8-sig")
        lines = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline=""))]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a table in UTF-8 ({error}); save it as CSV") from None
    numbered = [(number, cells) for number, cells in enumerate(lines, 1) if any(cells)]
    rows = _read_rows(path, numbered)
    if not rows:
        raise DataError(f"{path}: contains no image; write lines such as photo.jpg,cat")
    _check_splits(path, rows)
    found = _choose_task(path, rows, task)
    return LabelFile(path, tuple(rows), tuple(sorted({label for row in rows for label in row.labels})), found)


def _choose_task(path: Path, rows: Sequence[Row], task: str) -> Task:
    if task == "soft-label":
        raise DataError(f"--task soft-label: {path} has labels, not probabilities; use a data set in Python")
    several = next((row for row in rows if len(row.labels) > 1), None)
    if task == "multi-label" or (task == "auto" and several is not None):
        return "multi-label"
    if several is not None:
        raise DataError(f"{path}: line {several.line}: {len(several.labels)} labels; one image has one class here")
    without = next((row for row in rows if not row.labels), None)
    if without is not None:
        raise DataError(f"{path}: line {without.line}: must be a file and its label, such as photo.jpg,cat")
    return "single-label"


def _read_rows(path: Path, numbered: list[tuple[int, list[str]]]) -> list[Row]:
    heading = [cell.lower() for cell in numbered[0][1]] if numbered else []
    if heading and heading[0] in _FILE_HEADINGS:
        body = numbered[1:]
        split_column = heading.index("split") if "split" in heading else None
        label_columns = [at for at, name in enumerate(heading) if name.rstrip("0123456789_ ") in _LABEL_HEADINGS]
        if not label_columns:
            raise DataError(f"{path}: no column 'label' in the heading; name the columns file,label[,label...][,split]")
    else:
        body = numbered
        width = max((len(cells) for _, cells in body), default=0)
        has_splits = width > 2 and all(cells[-1].lower() in _SPLIT_OF for _, cells in body)
        split_column = -1 if has_splits else None
        label_columns = [*range(1, width)]
    return [_read_row(path, number, cells, label_columns, split_column) for number, cells in body]


def _read_row(path: Path, number: int, cells: list[str], label_columns: Sequence[int], split_column: int | None) -> Row:
    split = ""
    if split_column == -1:
        split, cells = _SPLIT_OF[cells[-1].lower()], cells[:-1]
    elif split_column is not None:
        given = cells[split_column] if split_column < len(cells) else ""
        split = _SPLIT_OF.get(given.lower(), "")
        if not split:
            raise DataError(f"{path}: line {number}: split '{given}': must be train, val or test")
    # A label that is repeated in a line counts once.
    labels = tuple(dict.fromkeys(cells[at] for at in label_columns if at < len(cells) and cells[at]))
    if not cells or not cells[0]:
        raise DataError(f"{path}: line {number}: must be a file and its label, such as photo.jpg,cat")
    inside = Path(cells[0])
    if inside.is_absolute() or ".." in inside.parts or not inside.name:
        raise DataError(f"{path}: line {number}: {cells[0]}: must be inside the folder of the table")
    return Row(number, cells[0], labels, split)


def _check_splits(path: Path, rows: list[Row]) -> None:
    first: dict[str, Row] = {}
    for row in rows:
        other = first.setdefault(row.file, row)
        if other is not row:
            raise DataError(f"{path}: lines {other.line} and {row.line}: {row.file} is listed twice; remove one")
    splits = {row.split for row in rows}
    if splits != {""} and "train" not in splits:
        raise DataError(f"{path}: no line of the split train; add some, or remove the column split")


def index_rows(table: LabelFile, split: str) -> Index:
    """Index the images of one split, by class and then by name; the empty split is the whole table.

    Images with several labels are ordered by name, and their labels are a matrix of 0 and 1.
    """
    root, several = table.path.parent, table.task == "multi-label"

    def build() -> Index:
        label_of = {name: label for label, name in enumerate(table.classes)}
        chosen = [row for row in table.rows if row.split == split]
        listed = sorted((0 if several else label_of[row.labels[0]], row.file, row) for row in chosen)
        files = [(_find_image(table, row), label) for label, _, row in listed]
        index = index_files(root, files, SkippedEntries())
        if not several:
            return index
        matrix = np.zeros((len(listed), len(table.classes)), np.int64)
        for number, (_, _, row) in enumerate(listed):
            matrix[number, [label_of[label] for label in row.labels]] = 1
        return replace(index, labels=matrix)

    name = f"table {table.path.name} {split}" + (" with several labels" if several else "")
    return load_or_build(root, name, signature(root, [table.path]), build)


def _find_image(table: LabelFile, row: Row) -> Path:
    path = table.path.parent / row.file
    candidates = [path] if path.suffix else [path.with_name(path.name + suffix) for suffix in EXTENSIONS]
    found = next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
    if found is None:
        raise DataError(f"{table.path}: line {row.line}: {row.file}: no such file; correct the line or remove it")
    return found
