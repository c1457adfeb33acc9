"""The tables of a run read back: to go on after a restore as if nothing had happened, and to see what is validated."""

import csv
import math
from pathlib import Path

from convolve.errors import ConvolveError
from convolve.report.lines import LineFile, mend, replace_file
from convolve.report.records import ValidRecord
from convolve.report.writers import EVENTS_FILE, TRAINING_FILE, VALIDATION_FILE, encode_event

Points = list[tuple[float, float]]


def rewind(folder: Path, step: int) -> None:
    """Drop the rows after a restored step from training.csv and validation.csv, and note the restore in events.jsonl.

    Without it a run that is restored would write the steps between its last checkpoint and its end twice. events.jsonl
    keeps everything, so that what happened can still be seen there. To be called before the writers are opened.
    """
    for name in (TRAINING_FILE, VALIDATION_FILE):
        _drop_rows_after(folder / name, step)
    if (folder / EVENTS_FILE).exists():
        events = LineFile(folder / EVENTS_FILE)
        events.write(encode_event("restored", step=step))
        events.close()


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table by column; a table that is not there has none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as error:
        raise ConvolveError(f"{path}: cannot be read as a table ({error}); move it away") from error


def read_points(path: Path, column: str) -> Points:
    """(epoch, value) in the order of epochs; empty cells and values that are not finite are left out."""
    points = []
    for number, row in enumerate(read_table(path), 2):
        if row.get(column) == "":
            continue
        try:
            points.append((float(row["epoch"]), float(row[column])))
        except (KeyError, TypeError, ValueError):
            raise ConvolveError(f"{path}: line {number} has no number for epoch or {column}; mend or move it") from None
    return sorted(point for point in points if math.isfinite(point[1]))


def read_validations(folder: Path) -> list[ValidRecord]:
    """The validations in validation.csv."""
    path = folder / VALIDATION_FILE
    try:
        return [
            ValidRecord(
                checkpoint=row["checkpoint"],
                step=int(row["step"]),
                epoch=float(row["epoch"]),
                loss=float(row["loss"]),
                accuracy=float(row["accuracy"]),
                samples=int(row["samples"]),
                seconds=float(row["seconds"]),
                images_per_second=float(row["images_per_second"]),
            )
            for row in read_table(path)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConvolveError(f"{path}: a row is not a validation ({error}); mend it or move the file away") from None


def _drop_rows_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    mend(path)
    lines = path.read_bytes().splitlines(keepends=True)
    kept = lines[:1] + [line for line, row in zip(lines[1:], read_table(path), strict=True) if _step(path, row) <= step]
    if kept != lines:
        replace_file(path, b"".join(kept))


def _step(path: Path, row: dict[str, str]) -> int:
    try:
        return int(row["step"])
    except (KeyError, ValueError, TypeError):
        raise ConvolveError(f"{path}: a row has no step: {row}; mend it or move the file away") from None
