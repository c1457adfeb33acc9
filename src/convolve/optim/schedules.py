"""Learning-rate schedules: pure functions of the samples seen, independent of batch size and restarts.

With p = samples / all samples of the run, r the peak learning rate, w = warm-up in samples:

    constant      r
    stepped       r * decay^(number of milestones d with d < p)
    cosine        r * (1 + cos(pi p)) / 2
    exponential   r * decay^floor(p * drops)           (without `floor` when smooth)
    polynomial    end + (r - end) * (1 - q)^power,     q = (samples - w) / (all samples - w), end = r * ratio or given
    trapezoid     linear from r * first to r in the fraction `rise` of the run, linear to r * last in the final `fall`
    onecycle      half cosines: from r * first to r in the fraction `rise` of the run, then to r * last (Smith 2018)

Warm-up multiplies the value by samples / w while samples < w; for `polynomial` it is linear from 0 to r.
Formulas: section 4.1 of the Graphcore TensorFlow CNN application; smooth `exponential` is that of the Ascend MNIST
example.

A package adds a schedule by an entry point in the group `convolve.schedules`. It is called as
`build(config, peak, span)` and returns the learning rate as a function of samples, including any warm-up.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from convolve.config import ScheduleConfig
from convolve.config.rules import SCHEDULE_GROUP
from convolve.errors import ConfigError

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class RunSpan:
    """Length of the run and of one epoch in samples."""

    total: int
    epoch: int


def _constant(config: ScheduleConfig, progress: float) -> float:
    return 1.0


def _stepped(config: ScheduleConfig, progress: float) -> float:
    return config.learning_rate_decay ** sum(milestone < progress for milestone in config.learning_rate_schedule)


def _cosine_decay(fraction: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * fraction))


def _cosine(config: ScheduleConfig, progress: float) -> float:
    return _cosine_decay(progress)


def _exponential(config: ScheduleConfig, progress: float) -> float:
    drops = progress * config.lr_drops
    return config.lr_decay_rate ** (math.floor(drops) if config.lr_staircase else drops)


def _trapezoid(config: ScheduleConfig, progress: float) -> float:
    rise, fall = config.rise_share, config.fall_share
    if progress < rise:
        return config.first_ratio + (1.0 - config.first_ratio) * progress / rise
    if progress > 1.0 - fall:
        return config.last_ratio + (1.0 - config.last_ratio) * (1.0 - progress) / fall
    return 1.0


def _onecycle(config: ScheduleConfig, progress: float) -> float:
    rise = config.rise_share
    if progress < rise:
        return 1.0 + (config.first_ratio - 1.0) * _cosine_decay(progress / rise)
    return config.last_ratio + (1.0 - config.last_ratio) * _cosine_decay((progress - rise) / (1.0 - rise))


SHAPES: dict[str, Callable[[ScheduleConfig, float], float]] = {
    "constant": _constant,
    "stepped": _stepped,
    "cosine": _cosine,
    "exponential": _exponential,
    "trapezoid": _trapezoid,
    "onecycle": _onecycle,
}


def _polynomial(config: ScheduleConfig, peak: float, span: RunSpan) -> Schedule:
    warmup = config.warmup_epochs * span.epoch
    end = config.abs_end_learning_rate
    if end is None:
        end = peak * config.poly_lr_end_ratio

    def rate(samples: int) -> float:
        if samples < warmup:
            return peak * samples / warmup
        remaining = 1.0 - (samples - warmup) / max(1.0, span.total - warmup)
        return float(end + (peak - end) * max(0.0, remaining) ** config.poly_lr_decay_power)

    return rate


def _load_entry_point(name: str) -> Callable[[ScheduleConfig, float, RunSpan], Schedule]:
    entries = list(entry_points(group=SCHEDULE_GROUP, name=name))
    if len(entries) != 1:
        raise ConfigError(f"--lr-schedule {name}: provided by {len(entries)} packages; keep one of them")
    target, remedy = entries[0].value, "fix or uninstall the package"
    try:
        build: Callable[[ScheduleConfig, float, RunSpan], Schedule] = entries[0].load()
    except Exception as error:
        raise ConfigError(f"--lr-schedule {name}: cannot import {target} ({error}); {remedy}") from error
    if not callable(build):
        raise ConfigError(f"--lr-schedule {name}: {target} is not callable; {remedy}")
    return build


def build_schedule(config: ScheduleConfig, peak: float, span: RunSpan) -> Schedule:
    """Return the learning rate as a function of the number of samples seen."""
    if config.lr_schedule == "polynomial":
        return _polynomial(config, peak, span)
    if config.lr_schedule not in SHAPES:
        return _load_entry_point(config.lr_schedule)(config, peak, span)
    shape = SHAPES[config.lr_schedule]
    warmup = config.warmup_epochs * span.epoch

    def rate(samples: int) -> float:
        ramp = samples / warmup if samples < warmup else 1.0
        return peak * ramp * shape(config, min(1.0, samples / span.total))

    return rate


def explain_warmup(config: ScheduleConfig, peak: float, span: RunSpan) -> str | None:
    """Return a line if the run ends inside its warm-up and never reaches the peak, else None."""
    warmup = config.warmup_epochs * span.epoch
    if not 0 < span.total < warmup:
        return None
    reached = peak * span.total / warmup
    return (
        f"the run ends inside its warm-up of {config.warmup_epochs:g} epochs, at a learning rate of {reached:.3g} of "
        f"{peak:.3g}; shorten it with --warmup-epochs"
    )
