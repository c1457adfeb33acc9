"""`convolve describe --schedule`: the learning rate of a config over its whole run."""

from dataclasses import dataclass
from pathlib import Path

from convolve.app.describe import known_dataset
from convolve.app.length import plan_samples
from convolve.app.training import CONFIG_FILE
from convolve.config import Config
from convolve.config.loading import parse, resolve
from convolve.data.feeding import count_used
from convolve.optim.schedules import Span, build_schedule

POINTS = 201
# Training images of ImageNet: what a config without a known data set is drawn for.
UNKNOWN_COUNT = 1_281_167


@dataclass(frozen=True)
class Curve:
    """The learning rate over a run: (epoch, rate) at evenly spaced places."""

    name: str
    schedule: str
    peak: float
    epochs: float
    global_batch_size: int
    points: tuple[tuple[float, float], ...]


def trace_schedule(what: str, *, config_path: Path | None = None) -> Curve:
    """The learning-rate curve of a named config, or of a run folder."""
    stored = Path(what) / CONFIG_FILE
    if stored.is_file():
        return trace(parse(stored.read_text(encoding="utf-8"), str(stored)))
    return trace(resolve(what, config_path).config)


def trace(config: Config) -> Curve:
    """The learning-rate curve of a config."""
    per_epoch = count_samples(config)
    total = plan_samples(config, per_epoch)
    peak = config.settled_optim().learning_rate
    rate = build_schedule(config.schedule, peak, Span(total, per_epoch))
    places = [round(total * index / (POINTS - 1)) for index in range(POINTS)]
    points = tuple((place / per_epoch, rate(place)) for place in places)
    return Curve(config.name, config.schedule.lr_schedule, peak, total / per_epoch, config.global_batch_size, points)


def count_samples(config: Config) -> int:
    """Training samples in an epoch, as far as they are known without the data."""
    entry = known_dataset(config)
    return count_used(entry.train_count if entry else UNKNOWN_COUNT, config.data)
