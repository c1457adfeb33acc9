"""Output of commands: a progress bar in a terminal and plain lines elsewhere, tables, and results as JSON."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from convolve.cli.streams import dropping_output, print_line
from convolve.distributed.topology import is_rank_zero
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord, format_train, format_validation

if TYPE_CHECKING:
    from convolve.runs.folds import FoldsReport
    from convolve.runs.results import TrainReport

REFRESH_SECONDS = 0.1
PLAIN_SECONDS = 2.0
Result = TypeVar("Result")


def format_start(run: RunInfo) -> str:
    """Return the first line of a run."""
    facts = run.facts
    model, data = f"{facts['model']} ({facts['parameters']:,} parameters)", facts["dataset"]
    if run.restored_step is None:
        return f"Training {model} on {data}; run folder {run.folder}"
    return f"Resuming {model} on {data} from step {run.restored_step}; run folder {run.folder}"


class TerminalConsole:
    """Progress bar with loss, accuracy, images/s and remaining time; validations are printed above it."""

    def __init__(self) -> None:
        self._console = RichConsole(file=sys.stdout, highlight=False, emoji=False)
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
        with dropping_output():
            self._console.print(line, markup=False)

    def progress(self, what: str, done: int, total: int | None) -> None:
        now = time.perf_counter()
        if now - self._refreshed < REFRESH_SECONDS and done != total:
            return
        self._refreshed = now
        if what not in self._tasks:
            for task in self._tasks.values():
                self._progress.remove_task(task)
            self._tasks = {what: self._progress.add_task(what, total=total, facts="")}
            with dropping_output():
                self._progress.start()
        self._progress.update(self._tasks[what], completed=done, total=total)
        with dropping_output():
            self._progress.refresh()

    def start(self, run: RunInfo) -> None:
        self.info(format_start(run))

    def train(self, record: TrainRecord) -> None:
        counted = "" if record.loss is None else f"loss {record.loss:.4f}  accuracy {record.accuracy:.2%}  "
        for task in self._tasks.values():
            self._progress.update(task, facts=f"{counted}{record.images_per_second:,.0f} images/s")

    def valid(self, record: ValidationRecord) -> None:
        self.info(format_validation(record))

    def event(self, kind: str, **facts: object) -> None:
        pass  # events are written to the log files only

    def close(self) -> None:
        with dropping_output():
            self._progress.stop()


class PlainConsole:
    """Plain lines for pipes, log files and `--json`; progress every few seconds, except for training, which logs."""

    def __init__(self) -> None:
        self._printed = time.perf_counter()

    def info(self, line: str) -> None:
        print_line(line)

    def progress(self, what: str, done: int, total: int | None) -> None:
        now = time.perf_counter()
        if what != "train" and now - self._printed > PLAIN_SECONDS:
            self._printed = now
            self.info(f"{what}: {done:,}" + (f" of {total:,}" if total else ""))

    def start(self, run: RunInfo) -> None:
        self.info(format_start(run))

    def train(self, record: TrainRecord) -> None:
        self.info(format_train(record))

    def valid(self, record: ValidationRecord) -> None:
        self.info(format_validation(record))

    def event(self, kind: str, **facts: object) -> None:
        pass  # events are written to the log files only

    def close(self) -> None:
        pass


@contextmanager
def open_console(as_json: bool = False) -> Iterator[TerminalConsole | PlainConsole]:
    """Open a progress bar if the output is a terminal, else plain lines, and close it."""
    console = TerminalConsole() if sys.stdout.isatty() and not as_json else PlainConsole()
    try:
        yield console
    finally:
        console.close()


def to_plain(value: Any) -> Any:
    """Return a value in JSON types; NaN and infinities become null."""
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


def print_json(result: Any) -> None:
    """Print a result as one JSON object on one line."""
    plain = to_plain(result)
    assert isinstance(plain, dict), "the result of a command is an object"
    print(json.dumps(plain))


def print_result(result: Result, as_json: bool, print_text: Callable[[Result], None]) -> None:
    """Print the result of a command: as text, or with `--json` as one JSON object."""
    print_json(result) if as_json else print_text(result)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table without borders; columns of numbers are right-aligned."""
    from rich.console import Console
    from rich.table import Table

    body = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        numeric = bool(body) and all(isinstance(row[index], int | float) for row in body)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    # Cells are printed as they are: a file may be named a[b].png or :x:.png.
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        console.print(table)
        return
    wide = Console(highlight=False, markup=False, emoji=False, width=160)
    with wide.capture() as captured:
        wide.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def format_bytes(count: float) -> str:
    """Return a number of bytes with a decimal unit, such as 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the loop ends with GB")


def finish_training(report: "TrainReport", as_json: bool) -> int:
    """Print the result of a run on rank 0 and return the exit code: 128 + signal number if a signal stopped it."""
    stopped_by = report.stopped_by
    if is_rank_zero():
        if stopped_by is not None:
            resume = f"convolve restore {report.run_dir}"
            print_line(f"Interrupted by {stopped_by.name} at step {report.steps}; resume with: {resume}")
        else:
            _print_report(report)
        if as_json:
            with dropping_output():
                print_json(report)
                sys.stdout.flush()
    return 0 if stopped_by is None else 128 + int(stopped_by)


def finish_folds(report: "FoldsReport", as_json: bool) -> int:
    """Print the result of a cross-validation and return the exit code, as `finish_training` does for a run."""
    stopped_by = report.runs[-1].stopped_by
    for fold, run in enumerate(report.runs):
        shown = "not validated" if run.test_accuracy is None else f"accuracy {run.test_accuracy:.2%}"
        print_line(f"fold {fold}: {shown}; run folder {run.run_dir}")
    if stopped_by is not None:
        print_line(f"Interrupted by {stopped_by.name}; train the remaining folds with --fold")
    elif report.mean is not None and report.deviation is not None:
        print_line(f"accuracy {report.mean:.2%} +/- {report.deviation:.2%} over {report.folds} folds")
    if as_json:
        print_json(report)
    return 0 if stopped_by is None else 128 + int(stopped_by)


def _print_report(report: "TrainReport") -> None:
    if report.test_accuracy is not None:
        accuracy = f"{report.split} accuracy {report.test_accuracy:.2%}"
        print_line(f"{accuracy} on {report.test_samples:,} images of {report.dataset}")
    print_line(
        f"{report.images_per_second:,.0f} images/s, {report.ms_per_step:.2f} ms/step, {report.seconds:.1f} s in total; "
        f"run folder {report.run_dir}"
    )
