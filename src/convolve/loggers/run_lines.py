"""The lines of a run on a terminal and in plain output: its start, one for each epoch, and the time that is left.

Every log point is in the files of the run folder. Plain output, such as a log file, also has a line for each quarter
of an epoch, because it has no progress bar.
"""

import math
import time

from convolve.config.selection import SelectBy, rank
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord, format_validation

WIDTH = 80
_PARTS = 4


def format_start(run: RunInfo) -> str:
    """Return the first line of a run, or two if one would be too long."""
    facts = run.facts
    model, data = f"{facts['model']} ({facts['parameters']:,} parameters)", facts["dataset"]
    if run.restored_step is None:
        return join_lines(f"Training {model} on {data}", f"run folder {run.folder}")
    return join_lines(f"Resuming {model} on {data} from step {run.restored_step}", f"run folder {run.folder}")


def join_lines(first: str, second: str, separator: str = "; ") -> str:
    """Return two statements as one line, or as two lines if one would be too long for a terminal."""
    joined = f"{first}{separator}{second}"
    return joined if len(joined) <= WIDTH else f"{first}\n{second}"


def format_seconds(seconds: float) -> str:
    """Return a duration such as 45 s, 3:20 min or 2:05 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 100 else f"{minutes // 60}:{minutes % 60:02d} h"


def _score(record: ValidationRecord) -> float:
    """Return the accuracy, or the mean average precision if images have several labels."""
    found = record.mean_average_precision
    return record.accuracy if found is None else found


def _name_score(record: ValidationRecord) -> str:
    return "" if record.mean_average_precision is None else "mAP "


class RunLines:
    """Collects what happens in an epoch and returns its line when the epoch is validated.

    Args:
        photos: use the words of a run on a folder of photos.
    """

    def __init__(self, *, photos: bool = False) -> None:
        self._photos = photos
        self._record: TrainRecord | None = None
        self._total = 0
        self._averages = False
        self._validates, self._epochs_between = True, 1.0
        self._select_by: SelectBy = "accuracy"
        self._found: ValidationRecord | None = None
        self._best: ValidationRecord | None = None
        self._first: tuple[float, int] | None = None
        self._part = self._epoch = 0
        self._training = False

    def start(self, run: RunInfo) -> str:
        """Return the first line of a run."""
        self._training = True
        self._averages = run.config.get("ema_decay") is not None
        self._select_by = run.config.get("select_by", "accuracy")
        self._validates = run.config.get("validation_mode", "during") == "during"
        self._epochs_between = float(run.config.get("validation_frequency", 1.0))
        if not self._photos:
            return format_start(run)
        resumed = "" if run.restored_step is None else f"resumed at step {run.restored_step}; "
        return f"{resumed}run folder {run.folder}"

    def progress(self, done: int, total: int | None) -> None:
        """Note the position in training."""
        self._first = self._first or (time.perf_counter(), done)
        self._total = total or 0

    def train(self, record: TrainRecord) -> str | None:
        """Note a log point; return a line if another quarter of an epoch is complete, for output without a bar."""
        self._record = record
        part = math.floor(record.epoch * _PARTS + 1e-6)
        due = part > self._part and part % _PARTS != 0
        self._part = max(part, self._part)
        return self._describe(record, f"epoch {record.epoch:.2f}", "") if due else None

    def epoch(self, record: TrainRecord) -> str | None:
        """Return the line of a complete epoch that ends without validation."""
        whole = math.floor(record.epoch + 1e-6)
        validated = self._validates and (whole % self._epochs_between == 0 or record.samples >= self._total)
        due = whole > self._epoch and not validated
        self._epoch = max(whole, self._epoch)
        return self._describe(record, f"epoch {whole}", "") if due else None

    def valid(self, record: ValidationRecord) -> str | None:
        """Return the line of an epoch; None if the validation of the averaged weights is still to come."""
        if not self._training:
            return format_validation(record)
        trained = self._record
        if (trained is not None and record.step != trained.step) or not record.checkpoint.startswith("step-"):
            return f"{record.checkpoint}: validation {_name_score(record)}{_score(record):.1%}, loss {record.loss:.3f}"
        found = self._better(record, self._found)
        if self._averages and record.step and not record.checkpoint.endswith("-ema"):
            self._found = found
            return None
        self._found, best = None, self._better(found, self._best)
        mark = " (best)" if best is found else ""
        self._best = best
        shown = f"validation {_name_score(found)}{_score(found):.1%}{mark}, "
        if trained is None:
            what = "classifier on frozen features" if self._photos else f"epoch {record.epoch:g}"
            return f"{what}: {shown}{record.seconds:.0f} s"
        return self._describe(trained, f"epoch {round(record.epoch, 2):g}", shown)

    def _better(self, record: ValidationRecord, other: ValidationRecord | None) -> ValidationRecord:
        if other is None:
            return record
        key, key_of_other = (rank(_score(found), found.loss, self._select_by) for found in (record, other))
        return record if key > key_of_other else other

    def _describe(self, record: TrainRecord, position: str, validation: str) -> str:
        loss = "" if record.loss is None else f"loss {record.loss:.3f}, "
        return f"{position}: {loss}{validation}{self._remaining(record)}"

    def _remaining(self, record: TrainRecord) -> str:
        speed = f"{record.images_per_second:,.0f} {'photos' if self._photos else 'images'}/s"
        left = max(0, self._total - record.samples)
        if self._first is None or record.samples <= self._first[1] or not left:
            return speed
        started, before = self._first
        seconds = (time.perf_counter() - started) / (record.samples - before) * left
        return f"{speed}, {format_seconds(seconds)} left"
