"""Loss scaling: the loss is multiplied by a factor, gradients are divided by it before they are used.

Small gradients then stay above the smallest number of a 16-bit format. A step whose gradients are not finite, or that
overflowed on a device that saturates, is skipped. The rules:

    static      the factor stays
    dynamic     torch's: x 2 after 2000 clean steps in a row, x 1/2 after each overflow; starts at 65536
    ascend      x 2 after 1000 clean steps, x 1/2 after 2 overflowed ones (in a row or not); starts at 2^32; counters
                start anew at each change; never below 1 nor above the range of fp32
    ramp        doubled in equal parts of the run: with k = int(log2(final // initial)) + 1 levels, level n is reached
                after n * (epochs // k) epochs (fractions of an epoch where epochs < k)
    automatic   every 16 steps the exponents of the scaled gradients decide: x 1/2 if more than one value in 10^7 lies
                above an eighth of the format's range, else x 2

A verdict is reached by all ranks alike: `agree` turns one rank's "this is bad" into everybody's.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from convolve.config.training import PrecisionConfig
from convolve.numerics.formats import DEVICE_MODELS, FP32
from convolve.numerics.policy import Policy

DEFAULT_SCALE = 128.0
MAX_SCALE = 2.0**126
AUTOMATIC_MAX_SCALE = 2.0**24
AnyRank = Callable[[bool], bool]


def single_process(bad: bool) -> bool:
    """The agreement of a single rank with itself."""
    return bad


@dataclass(frozen=True)
class GradCheck:
    """Whether a step's gradients can be used, and the factor that was on them."""

    clean: bool
    scale: float


class Scaler(Protocol):
    """Knows the factor, divides gradients by it, and learns from each verdict."""

    scale: float
    skipped: int

    def settle(self, network: nn.Module, overflowed: bool) -> GradCheck:
        """Look at the gradients of all ranks, divide them by the factor, and judge."""

    def follow(self, verdict: GradCheck, samples: int) -> None:
        """Adapt to a verdict; `samples` have been seen by now."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""

    def restore(self, state: dict[str, Any]) -> None:
        """Become what a checkpoint holds."""


class NoScaling:
    """fp32 needs none: gradients are used as they are, unseen."""

    scale = 1.0
    skipped = 0

    def settle(self, network: nn.Module, overflowed: bool) -> GradCheck:
        """All is well."""
        return GradCheck(True, 1.0)

    def follow(self, verdict: GradCheck, samples: int) -> None:
        """Nothing changes."""

    def state(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing to take back."""


class StaticScaling:
    """A factor that stays; the base of those that change."""

    rule = "static"

    def __init__(self, scale: float, agree: AnyRank = single_process) -> None:
        self.scale = scale
        self.skipped = 0
        self.agree = agree

    def settle(self, network: nn.Module, overflowed: bool) -> GradCheck:
        """Divide by the factor, and find out whether all gradients of all ranks are finite."""
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        self.look(gradients)
        bad = self.judge_overflow(overflowed) or not _all_finite(gradients)
        torch._foreach_mul_(gradients, 1.0 / self.scale)
        verdict = GradCheck(not self.agree(bad), self.scale)
        self.skipped += not verdict.clean
        return verdict

    def judge_overflow(self, overflowed: bool) -> bool:
        """Whether a value that left its format makes a step bad by itself; a fixed factor could not help."""
        return False

    def look(self, gradients: list[Tensor]) -> None:
        """See the gradients before they are divided."""

    def follow(self, verdict: GradCheck, samples: int) -> None:
        """The factor stays."""

    def state(self) -> dict[str, Any]:
        """Factor and counters."""
        return {key: value for key, value in vars(self).items() if isinstance(value, (int, float))}

    def restore(self, state: dict[str, Any]) -> None:
        """Take factor and counters back."""
        for key in self.state():
            if key in state:
                setattr(self, key, type(getattr(self, key))(state[key]))


class DynamicScaling(StaticScaling):
    """Up after a number of clean steps, down after a number of bad ones."""

    def __init__(
        self, scale: float, *, growth_steps: int, patience: int, in_a_row: bool, agree: AnyRank = single_process
    ) -> None:
        super().__init__(scale, agree)
        self._growth_steps = growth_steps
        self._patience = patience
        self._in_a_row = in_a_row
        self.clean_steps = 0
        self.bad_steps = 0

    def judge_overflow(self, overflowed: bool) -> bool:
        """A saturating device shows an overflow only here."""
        return overflowed

    def follow(self, verdict: GradCheck, samples: int) -> None:
        """Count, and change the factor when a count is full."""
        self.clean_steps = self.clean_steps + 1 if verdict.clean else 0
        self.bad_steps += not verdict.clean
        if self._in_a_row and verdict.clean:
            self.bad_steps = 0
        if self.bad_steps >= self._patience:
            self._change(0.5)
        elif self.clean_steps >= self._growth_steps:
            self._change(2.0)

    def _change(self, factor: float) -> None:
        self.scale = min(max(self.scale * factor, 1.0), MAX_SCALE)
        self.clean_steps = self.bad_steps = 0

    def state(self) -> dict[str, Any]:
        """Factor and counters, not the rule itself."""
        return {
            "scale": self.scale,
            "skipped": self.skipped,
            "clean_steps": self.clean_steps,
            "bad_steps": self.bad_steps,
        }


class RampScaling(StaticScaling):
    """Doubles in equal parts of the run; a function of samples seen, so nothing has to be kept but the skips."""

    def __init__(self, initial: float, final: float, span: tuple[int, int], agree: AnyRank = single_process) -> None:
        super().__init__(initial, agree)
        self._initial = initial
        total, epoch = span
        self._levels = int(math.log2(final // initial)) + 1
        epochs = total / epoch
        whole = epochs // self._levels
        self._period = (whole or epochs / self._levels) * epoch

    def follow(self, verdict: GradCheck, samples: int) -> None:
        """The factor of the next step."""
        self.scale = self._initial * 2.0 ** min(self._levels - 1, int(samples // self._period))

    def state(self) -> dict[str, Any]:
        """The factor and the skips."""
        return {"scale": self.scale, "skipped": self.skipped}


class AutomaticScaling(StaticScaling):
    """As high as the histogram of the gradients' exponents allows."""

    PERIOD = 16
    SHARE = 1e-7

    def __init__(self, scale: float, largest: float, agree: AnyRank = single_process) -> None:
        super().__init__(scale, agree)
        self._edge = largest / 8
        self.steps = 0
        self.high = 0
        self.seen = 0

    def judge_overflow(self, overflowed: bool) -> bool:
        """A saturating device shows an overflow only here."""
        return overflowed

    def look(self, gradients: list[Tensor]) -> None:
        """Count values near the end of the range."""
        self.high += sum(int((gradient.abs() > self._edge).sum()) for gradient in gradients)
        self.seen += sum(gradient.numel() for gradient in gradients)

    def follow(self, verdict: GradCheck, samples: int) -> None:
        """Halve at once after an overflow; otherwise decide once in a period."""
        self.steps += 1
        if not verdict.clean:
            self._change(0.5)
        elif self.steps >= self.PERIOD:
            crowded = self.agree(self.high > self.SHARE * self.seen)
            self._change(0.5 if crowded else 2.0)

    def _change(self, factor: float) -> None:
        self.scale = min(max(self.scale * factor, 1.0), AUTOMATIC_MAX_SCALE)
        self.steps = self.high = self.seen = 0

    def state(self) -> dict[str, Any]:
        """Factor and counters."""
        return {name: getattr(self, name) for name in ("scale", "skipped", "steps", "high", "seen")}


def _all_finite(gradients: Iterable[Tensor]) -> bool:
    # A sum is finite only if all its parts are; in float64 it cannot overflow by itself.
    sums = [gradient.sum(dtype=torch.float64) for gradient in gradients]
    return bool(torch.stack(sums).isfinite().all()) if sums else True


def build_scaler(
    config: PrecisionConfig, policy: Policy, span: tuple[int, int], agree: AnyRank = single_process
) -> Scaler:
    """The scaler that a config asks for; `span` is the run and one epoch in samples."""
    model = DEVICE_MODELS[config.device_model] if config.device_model else None
    rule = config.loss_scaling_rule
    if model is not None and rule == "static" and config.loss_scaling is None:
        rule = model.loss_scaling_rule  # type: ignore[assignment]
    if policy.compute is FP32 and config.loss_scaling is None and rule == "static":
        return NoScaling()
    final = config.loss_scaling or DEFAULT_SCALE
    first = config.initial_loss_scaling
    if rule == "dynamic":
        return DynamicScaling(first or 65536.0, growth_steps=2000, patience=1, in_a_row=True, agree=agree)
    if rule == "ascend":
        return DynamicScaling(first or 2.0**32, growth_steps=1000, patience=2, in_a_row=False, agree=agree)
    if rule == "ramp":
        return RampScaling(first or 1.0, final, span, agree)
    if rule == "automatic":
        return AutomaticScaling(first or final, policy.compute.largest, agree)
    return StaticScaling(final, agree)
