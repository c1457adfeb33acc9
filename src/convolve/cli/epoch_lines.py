"""Output of a run on photos: one line for each epoch, and the result in the words of a user."""

import time
from typing import TYPE_CHECKING

from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord
from convolve.loggers.streams import print_line
from convolve.loggers.terminal import RunLines
from convolve.report.interval import half_width
from convolve.run_files import REPORT_FILE

if TYPE_CHECKING:
    from convolve.runs.results import TrainReport


class EpochLines(RunLines):
    """Collects what happens in an epoch and returns its line when the epoch is validated."""

    def __init__(self) -> None:
        self._record: TrainRecord | None = None
        self._total = 0
        self._averages = False
        self._accuracy = self._best = -1.0
        self._first: tuple[float, int] | None = None

    def start(self, run: RunInfo) -> str:
        """Return the first line of a run."""
        self._averages = run.config.get("ema_decay") is not None
        resumed = "" if run.restored_step is None else f"resumed at step {run.restored_step}; "
        return f"{resumed}run folder {run.folder}"

    def progress(self, done: int, total: int | None) -> None:
        """Note the position in training."""
        self._first = self._first or (time.perf_counter(), done)
        self._total = total or 0

    def train(self, record: TrainRecord) -> str | None:
        """Note a log point, and print nothing."""
        self._record = record
        return None

    def valid(self, record: ValidationRecord) -> str | None:
        """Return the line of an epoch; None if the validation of the averaged weights is still to come."""
        self._accuracy = max(self._accuracy, record.accuracy)
        if self._averages and record.step and not record.checkpoint.endswith("-ema"):
            return None
        accuracy, self._accuracy = self._accuracy, -1.0
        mark = " (best)" if accuracy > self._best else ""
        self._best = max(self._best, accuracy)
        shown = f"validation {accuracy:.1%}{mark}"
        if self._record is None:
            return f"classifier on frozen features: {shown}, {record.seconds:.0f} s"
        loss = "" if self._record.loss is None else f"loss {self._record.loss:.3f}, "
        return f"epoch {record.epoch:g}: {loss}{shown}, {self._remaining(self._record)}"

    def _remaining(self, record: TrainRecord) -> str:
        speed = f"{record.images_per_second:,.0f} photos/s"
        left = max(0, self._total - record.samples)
        if self._first is None or record.samples <= self._first[1] or not left:
            return speed
        started, before = self._first
        seconds = (time.perf_counter() - started) / (record.samples - before) * left
        return f"{speed}, {format_seconds(seconds)} left"


def format_seconds(seconds: float) -> str:
    """Return a duration such as 45 s, 3:20 min or 2:05 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 100 else f"{minutes // 60}:{minutes % 60:02d} h"


def print_photo_result(report: "TrainReport") -> None:
    """Print the last line of a run on photos."""
    if report.stopped_early is not None:
        print_line(f"stopped after {report.steps:,} steps: {report.stopped_early}")
    if report.test_accuracy is None or not report.test_samples:
        print_line(f"run folder {report.run_dir}")
        return
    half = half_width(report.test_accuracy, report.test_samples)
    counts = f"chance {report.chance:.0%}, {report.test_samples:,} photos, +/-{100 * half:.1f}"
    print_line(
        f"accuracy {report.test_accuracy:.1%} ({counts}) - open {report.run_dir / REPORT_FILE}, "
        f"try: convolve serve {report.run_dir}"
    )
