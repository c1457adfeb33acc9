"""Tables for people, one JSON line for programs."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """A value in JSON types; NaN and infinities become null, because JSON has none."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_json(value: Any) -> None:
    """The one JSON object that ends the output of a verb."""
    print(json.dumps(plain(value)), flush=True)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table without lines around it; numbers stand on the right."""
    from rich.console import Console
    from rich.table import Table

    body = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        numeric = bool(body) and all(isinstance(row[index], int | float) for row in body)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(table)
        return
    paper = Console(highlight=False, width=160)
    with paper.capture() as captured:
        paper.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the loop ends with GB")
