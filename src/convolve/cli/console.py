"""What a person sees while convolve works: a progress bar in a terminal, plain lines elsewhere.

Tables for people, one JSON line for programs.

The closing words of a training.
"""

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from convolve.distributed.topology import is_rank_zero
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord, format_train, format_validation

if TYPE_CHECKING:
    from convolve.runs.session import TrainReport

REFRESH_SECONDS = 0.1
PLAIN_SECONDS = 2.0


def describe_start(run: RunInfo) -> str:
    """The line that opens a run."""
    facts = run.facts
    verb = "trains" if run.restored_step is None else f"goes on from step {run.restored_step}"
    return (
        f"{facts['model']} ({facts['parameters']:,} parameters) {verb} on {facts['dataset']}; run folder {run.folder}"
    )


class TerminalConsole:
    """A bar with loss, accuracy, rate and time to go; validations stay on the screen above it."""

    def __init__(self) -> None:
        self._console = RichConsole(file=sys.stdout, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            auto_refresh=False,
        )
        self._tasks: dict[str, TaskID] = {}
        self._refreshed = 0.0

    def info(self, line: str) -> None:
        """One line above the bar."""
        self._console.print(line, markup=False)

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Move the bar; at most a few times a second, whatever the step rate."""
        now = time.perf_counter()
        if now - self._refreshed < REFRESH_SECONDS and done != total:
            return
        self._refreshed = now
        if what not in self._tasks:
            for task in self._tasks.values():
                self._progress.remove_task(task)
            self._tasks = {what: self._progress.add_task(what, total=total, facts="")}
            self._progress.start()
        self._progress.update(self._tasks[what], completed=done, total=total)
        self._progress.refresh()

    def start(self, run: RunInfo) -> None:
        """Say what begins."""
        self.info(describe_start(run))

    def train(self, record: TrainRecord) -> None:
        """Show the newest figures beside the bar."""
        counted = "" if record.loss is None else f"loss {record.loss:.4f}  accuracy {record.accuracy:.2%}  "
        for task in self._tasks.values():
            self._progress.update(task, facts=f"{counted}{record.images_per_second:,.0f} images/s")

    def valid(self, record: ValidationRecord) -> None:
        """Keep each validation on the screen."""
        self.info(format_validation(record))

    def event(self, kind: str, **facts: object) -> None:
        """Events go to the files only."""

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()


class PlainConsole:
    """Plain lines, for pipes, log files and `--json`."""

    def __init__(self) -> None:
        self._said = time.perf_counter()

    def info(self, line: str) -> None:
        """One line."""
        print(line, flush=True)

    def progress(self, what: str, done: int, total: int | None) -> None:
        """A line every few seconds for work that has no log points of its own."""
        now = time.perf_counter()
        if what != "train" and now - self._said > PLAIN_SECONDS:
            self._said = now
            self.info(f"{what}: {done:,}" + (f" of {total:,}" if total else ""))

    def start(self, run: RunInfo) -> None:
        """Say what begins."""
        self.info(describe_start(run))

    def train(self, record: TrainRecord) -> None:
        """One line for each log point."""
        self.info(format_train(record))

    def valid(self, record: ValidationRecord) -> None:
        """One line for each validation."""
        self.info(format_validation(record))

    def event(self, kind: str, **facts: object) -> None:
        """Events go to the files only."""

    def close(self) -> None:
        """Nothing to close."""


def open_console() -> TerminalConsole | PlainConsole:
    """The console that fits where the output goes."""
    return TerminalConsole() if sys.stdout.isatty() else PlainConsole()


def to_plain(value: Any) -> Any:
    """A value in JSON types; NaN and infinities become null, because JSON has none."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_json(value: Any) -> None:
    """The one JSON object that ends the output of a verb."""
    print(json.dumps(to_plain(value)), flush=True)


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


def format_bytes(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the loop ends with GB")


def print_result(report: "TrainReport") -> int:
    """Say what came out, and give the exit code: 0, or 128 + signal number for a run that was stopped."""
    if not is_rank_zero():
        return 0 if report.stopped_by is None else 128 + int(report.stopped_by)
    if report.stopped_by is not None:
        print(
            f"stopped by {report.stopped_by.name} at step {report.steps}; go on with: convolve restore {report.run_dir}"
        )
        return 128 + int(report.stopped_by)
    if report.test_accuracy is not None:
        print(f"test accuracy {report.test_accuracy:.2%} on {report.test_samples:,} images of {report.dataset}")
    print(
        f"{report.images_per_second:,.0f} images/s, {report.ms_per_step:.2f} ms/step, {report.seconds:.1f} s in all; "
        f"run folder {report.run_dir}"
    )
    return 0
