"""Learning-rate schedules: pure functions of samples seen, so that no batch size or restart can shift them.

With p = samples / all samples of the run, r the peak rate, w = warm-up in samples:

    constant      r
    stepped       r * decay^(number of drops d with d < p)
    cosine        r * (1 + cos(pi p)) / 2
    exponential   r * decay^floor(p * drops)           (without `floor` when smooth)
    polynomial    end + (r - end) * (1 - q)^power,     q = (samples - w) / (all samples - w), end = r * ratio

Warm-up multiplies the value by samples / w while samples < w; for `polynomial` it is the straight line to r.
Formulas: section 4.1 of the Graphcore TensorFlow CNN application; `exponential` smooth is the Ascend MNIST example's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from convolve.config import ScheduleConfig

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Span:
    """The run in samples: all of it, and one epoch."""

    total: int
    epoch: int


def _constant(config: ScheduleConfig, progress: float) -> float:
    return 1.0


def _stepped(config: ScheduleConfig, progress: float) -> float:
    return config.learning_rate_decay ** sum(drop < progress for drop in config.learning_rate_schedule)


def _cosine(config: ScheduleConfig, progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _exponential(config: ScheduleConfig, progress: float) -> float:
    drops = progress * config.lr_drops
    return config.lr_decay_rate ** (math.floor(drops) if config.lr_staircase else drops)


SHAPES: dict[str, Callable[[ScheduleConfig, float], float]] = {
    "constant": _constant,
    "stepped": _stepped,
    "cosine": _cosine,
    "exponential": _exponential,
}


def _polynomial(config: ScheduleConfig, peak: float, span: Span) -> Schedule:
    warmup = config.warmup_epochs * span.epoch
    end = peak * config.poly_lr_end_ratio

    def rate(samples: int) -> float:
        if samples < warmup:
            return peak * samples / warmup
        left = 1.0 - (samples - warmup) / max(1.0, span.total - warmup)
        return float(end + (peak - end) * max(0.0, left) ** config.poly_lr_decay_power)

    return rate


def build_schedule(config: ScheduleConfig, peak: float, span: Span) -> Schedule:
    """The learning rate as a function of the number of samples seen so far."""
    if config.lr_schedule == "polynomial":
        return _polynomial(config, peak, span)
    shape = SHAPES[config.lr_schedule]
    warmup = config.warmup_epochs * span.epoch

    def rate(samples: int) -> float:
        ramp = samples / warmup if samples < warmup else 1.0
        return peak * ramp * shape(config, min(1.0, samples / span.total))

    return rate
