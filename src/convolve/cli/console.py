"""Output of commands: a progress bar in a terminal and plain lines elsewhere, tables, and results as JSON."""

import json
import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from convolve.distributed.topology import is_rank_zero
from convolve.loggers.run_lines import RunLines, join_lines
from convolve.loggers.streams import dropping_output, print_line
from convolve.loggers.terminal import PlainConsole, TerminalConsole
from convolve.report.interval import half_width
from convolve.run_files import REPORT_FILE

if TYPE_CHECKING:
    from convolve.api.run import Run
    from convolve.label_scores import LabelScore
    from convolve.runs.folds import FoldsReport
    from convolve.runs.results import TrainReport

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))

Result = TypeVar("Result")


@contextmanager
def open_console(as_json: bool = False, *, photos: bool = False) -> Iterator[TerminalConsole | PlainConsole]:
    """Open a progress bar if the output is a terminal, else plain lines, and close it.

    `photos` is for a run on a folder of photos.
    """
    lines = RunLines(photos=photos)
    console = TerminalConsole(lines) if sys.stdout.isatty() and not as_json else PlainConsole(lines)
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


def print_labels(scores: "Sequence[LabelScore]") -> None:
    """Print the scores of each label as a table."""
    rows = [
        (
            score.label,
            score.images,
            "-" if score.average_precision is None else f"{score.average_precision:.2%}",
            f"{score.threshold:.3f}",
            *(f"{value:.2%}" for value in (score.precision, score.recall, score.f1)),
        )
        for score in scores
    ]
    print_table(("label", "images", "average precision", "threshold", "precision", "recall", "F1"), rows)


def format_bytes(count: float) -> str:
    """Return a number of bytes with a decimal unit, such as 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the loop ends with GB")


def run_training(train: "Callable[[], Run]", as_json: bool) -> int:
    """Train, print the result on rank 0 and return the exit code: 128 + signal number if a signal stopped the run."""
    from convolve.api.run import Stopped

    with _exit_on_signals():
        try:
            return finish_training(train().result, as_json)
        except Stopped as stopped:
            return finish_training(stopped.run.result, as_json)
        except SystemExit as ended:
            # The handler below raised it after the run was saved.
            if not isinstance(ended.__cause__, Stopped):
                raise
            return finish_training(ended.__cause__.run.result, as_json)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Inside the block, SIGTERM and SIGHUP end the process by an exception, so the result of a run can be printed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, leave) for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish_training(report: "TrainReport | None", as_json: bool) -> int:
    """Print the result of a run on rank 0 and return the exit code."""
    assert report is not None, "a run that was trained here has a result"
    stopped_by = report.stopped_by
    if is_rank_zero():
        if stopped_by is not None:
            resume = f"convolve restore {report.run_dir}"
            reason = stopped_by.name if isinstance(stopped_by, signal.Signals) else stopped_by
            print_line(f"Interrupted by {reason} at step {report.steps}; resume with: {resume}")
        elif report.chance is not None:
            _print_photo_result(report)
        else:
            _print_report(report)
        if as_json:
            with dropping_output():
                print_json(report)
                sys.stdout.flush()
    return 128 + int(stopped_by) if isinstance(stopped_by, signal.Signals) else 0


def finish_folds(report: "FoldsReport", as_json: bool) -> int:
    """Print the result of a cross-validation and return the exit code, as `finish_training` does for a run."""
    stopped_by = report.runs[-1].stopped_by
    name = "mean average precision" if any(run.labels for run in report.runs) else "accuracy"
    for fold, run in enumerate(report.runs):
        shown = "not validated" if run.score is None else f"{name} {run.score:.2%}"
        print_line(f"fold {fold}: {shown}; run folder {run.run_dir}")
    if stopped_by is not None:
        reason = stopped_by.name if isinstance(stopped_by, signal.Signals) else stopped_by
        print_line(f"Interrupted by {reason}; train the remaining folds with --fold")
    elif report.mean is not None and report.deviation is not None:
        print_line(f"{name} {report.mean:.2%} +/- {report.deviation:.2%} over {report.folds} folds")
    if as_json:
        print_json(report)
    return 128 + int(stopped_by) if isinstance(stopped_by, signal.Signals) else 0


def _print_report(report: "TrainReport") -> None:
    speed = (
        f"{report.images_per_second:,.0f} images/s, {report.ms_per_step:.2f} ms/step, {report.seconds:.1f} s in total"
    )
    print_line(join_lines(speed, f"run folder {report.run_dir}"))
    if report.labels:
        print_labels(report.labels)
    if report.test_accuracy is not None:
        found = report.metrics.get("mean_average_precision")
        ranked = "" if found is None else f"{report.split} mean average precision {found:.2%}, "
        accuracy = f"{ranked}{report.split} accuracy {report.test_accuracy:.2%}"
        print_line(f"{accuracy} on {report.test_samples:,} images of {report.dataset}")


def _print_photo_result(report: "TrainReport") -> None:
    if report.stopped_early is not None:
        print_line(f"stopped after {report.steps:,} steps: {report.stopped_early}")
    if report.test_accuracy is None or not report.test_samples:
        print_line(f"run folder {report.run_dir}")
        return
    half = half_width(report.test_accuracy, report.test_samples)
    counts = f"chance {report.chance:.0%}, {report.test_samples:,} photos, +/-{100 * half:.1f}"
    result = f"accuracy {report.test_accuracy:.1%} ({counts})"
    follow_up = f"open {report.run_dir / REPORT_FILE}, try: convolve serve {report.run_dir}"
    # A log file has one line; it would not fit a terminal.
    print_line(join_lines(result, follow_up, " - ") if sys.stdout.isatty() else f"{result} - {follow_up}")
