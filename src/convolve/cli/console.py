"""What a person sees while convolve works: a progress bar in a terminal, plain lines elsewhere."""

import sys
import time

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from convolve.report.records import RunInfo, TrainRecord, ValidRecord
from convolve.report.wording import describe_train, describe_valid

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

    def say(self, line: str) -> None:
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
        self.say(describe_start(run))

    def train(self, record: TrainRecord) -> None:
        """Show the newest figures beside the bar."""
        counted = "" if record.loss is None else f"loss {record.loss:.4f}  accuracy {record.accuracy:.2%}  "
        for task in self._tasks.values():
            self._progress.update(task, facts=f"{counted}{record.images_per_second:,.0f} images/s")

    def valid(self, record: ValidRecord) -> None:
        """Keep each validation on the screen."""
        self.say(describe_valid(record))

    def event(self, kind: str, **facts: object) -> None:
        """Events go to the files only."""

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()


class PlainConsole:
    """Plain lines, for pipes, log files and `--json`."""

    def __init__(self) -> None:
        self._said = time.perf_counter()

    def say(self, line: str) -> None:
        """One line."""
        print(line, flush=True)

    def progress(self, what: str, done: int, total: int | None) -> None:
        """A line every few seconds for work that has no log points of its own."""
        now = time.perf_counter()
        if what != "train" and now - self._said > PLAIN_SECONDS:
            self._said = now
            self.say(f"{what}: {done:,}" + (f" of {total:,}" if total else ""))

    def start(self, run: RunInfo) -> None:
        """Say what begins."""
        self.say(describe_start(run))

    def train(self, record: TrainRecord) -> None:
        """One line for each log point."""
        self.say(describe_train(record))

    def valid(self, record: ValidRecord) -> None:
        """One line for each validation."""
        self.say(describe_valid(record))

    def event(self, kind: str, **facts: object) -> None:
        """Events go to the files only."""

    def close(self) -> None:
        """Nothing to close."""


def open_console() -> TerminalConsole | PlainConsole:
    """The console that fits where the output goes."""
    return TerminalConsole() if sys.stdout.isatty() else PlainConsole()
