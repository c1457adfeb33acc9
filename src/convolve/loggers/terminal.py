"""Output of a run on a terminal or in plain lines."""

import sys
import time
from collections.abc import Callable

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord
from convolve.loggers.run_lines import RunLines, format_seconds
from convolve.loggers.streams import dropping_output, print_line

REFRESH_SECONDS = 0.1
PLAIN_SECONDS, MOST_PLAIN_SECONDS = 2.0, 60.0
_BAR = 16


class TerminalConsole:
    """Progress bar with loss, images/s and remaining time; above it, one line for each epoch."""

    def __init__(self, lines: RunLines | None = None) -> None:
        self._lines = lines or RunLines()
        self._console = RichConsole(file=sys.stdout, highlight=False, emoji=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=_BAR),
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
        if what == "train":
            self._lines.progress(done, total)
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
        self.info(self._lines.start(run))

    def train(self, record: TrainRecord) -> None:
        self._lines.train(record)
        if line := self._lines.epoch(record):
            self.info(line)
        counted = "" if record.loss is None else f"loss {record.loss:.4f}, "
        for task in self._tasks.values():
            self._progress.update(task, facts=f"{counted}{record.images_per_second:,.0f} images/s")

    def valid(self, record: ValidationRecord) -> None:
        if line := self._lines.valid(record):
            self.info(line)

    def event(self, kind: str, **facts: object) -> None:
        pass  # events are written to the log files only

    def close(self) -> None:
        with dropping_output():
            self._progress.stop()


class PlainConsole:
    """Plain lines for pipes, log files and `--json`: a few for each epoch, and the progress of other work.

    The progress of a task is printed after 2 s, then after twice as long each time, up to a minute, with the time that
    is left.
    """

    def __init__(self, lines: RunLines | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lines = lines or RunLines()
        self._clock = clock
        self._printed, self._wait = clock(), PLAIN_SECONDS
        self._task, self._first = "", (0.0, 0)

    def info(self, line: str) -> None:
        print_line(line)

    def progress(self, what: str, done: int, total: int | None) -> None:
        if what == "train":
            self._lines.progress(done, total)
        now = self._clock()
        if what != self._task:
            self._task, self._first, self._wait = what, (now, done), PLAIN_SECONDS
        if what != "train" and now - self._printed > self._wait:
            self._printed, self._wait = now, min(2 * self._wait, MOST_PLAIN_SECONDS)
            self.info(f"{what}: {done:,}" + (f" of {total:,}{self._remaining(now, done, total)}" if total else ""))

    def _remaining(self, now: float, done: int, total: int) -> str:
        started, before = self._first
        if not before < done < total:
            return ""
        return f", {format_seconds((now - started) / (done - before) * (total - done))} left"

    def start(self, run: RunInfo) -> None:
        self.info(self._lines.start(run))

    def train(self, record: TrainRecord) -> None:
        if line := self._lines.train(record) or self._lines.epoch(record):
            self.info(line)

    def valid(self, record: ValidationRecord) -> None:
        if line := self._lines.valid(record):
            self.info(line)

    def event(self, kind: str, **facts: object) -> None:
        pass  # events are written to the log files only

    def close(self) -> None:
        pass
