"""Loss scaling: the loss is multiplied by a scale, and gradients are divided by it before they are used.

Small gradients then stay above the smallest number of a 16-bit format. A step whose gradients are not finite, or that
overflowed on a saturating device, is skipped. The rules:

    static      the scale is constant
    dynamic     as in torch: x 2 after 2000 good steps in a row, x 1/2 after each bad step; starts at 65536
    ascend      x 2 after 1000 good steps in a row, x 1/2 after 2 bad steps (in a row or not); starts at 2^32; both
                counters restart at each change; never below 1 nor above 2^126
    ramp        doubled in equal parts of the run: with k = int(log2(final // initial)) + 1 levels, level n is reached
                after n * (epochs // k) epochs (fractions of an epoch if epochs < k)
    automatic   every 16 steps, x 1/2 if more than one scaled gradient value in 10^7 is above an eighth of the range of
                the format, else x 2; x 1/2 after each bad step

All ranks reach the same result: `any_rank` returns True on every rank if it is called with True on one of them.
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
    """Return the flag of the only rank."""
    return bad


@dataclass(frozen=True)
class GradCheck:
    """Result of the gradient check of a step: usable or not, and the scale that the gradients had."""

    finite: bool
    scale: float


class Scaler(Protocol):
    """Interface of a loss scaler; `skipped` counts the skipped steps."""

    scale: float
    skipped: int

    def unscale_(self, model: nn.Module, overflowed: bool) -> GradCheck:
        """Unscale gradients in place and check on all ranks that they are finite."""

    def update(self, check: GradCheck, samples: int) -> None:
        """Choose the scale of the next step; `samples` is the position in the run after this one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the values that a checkpoint must contain."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values of `state_dict`; missing ones are kept as they are."""


class NoScaling:
    """Uses gradients as they are and does not check them, for fp32."""

    scale = 1.0
    skipped = 0

    def unscale_(self, model: nn.Module, overflowed: bool) -> GradCheck:
        return GradCheck(True, 1.0)

    def update(self, check: GradCheck, samples: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class StaticScaling:
    """Constant scale; the base class of the rules that change it."""

    # An overflow on a saturating device leaves finite gradients. Skipping the step helps only if the scale can change.
    skips_overflow = False
    _STATE: tuple[str, ...] = ("scale", "skipped")

    def __init__(self, scale: float, any_rank: AnyRank = single_process) -> None:
        self.scale = scale
        self.skipped = 0
        self.any_rank = any_rank

    def unscale_(self, model: nn.Module, overflowed: bool) -> GradCheck:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.observe(gradients)
        bad = (overflowed and self.skips_overflow) or not _all_finite(gradients)
        torch._foreach_mul_(gradients, 1.0 / self.scale)
        check = GradCheck(not self.any_rank(bad), self.scale)
        self.skipped += not check.finite
        return check

    def observe(self, gradients: list[Tensor]) -> None:
        """Look at the gradients before they are unscaled."""

    def update(self, check: GradCheck, samples: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._STATE:
            if name in state:
                setattr(self, name, type(getattr(self, name))(state[name]))


class DynamicScaling(StaticScaling):
    """Doubles the scale after `growth_steps` good steps in a row and halves it after `backoff_steps` bad ones.

    With `consecutive`, a good step resets the count of bad ones.
    """

    skips_overflow = True
    _STATE = ("scale", "skipped", "clean_steps", "bad_steps")

    def __init__(
        self,
        scale: float,
        *,
        growth_steps: int,
        backoff_steps: int,
        consecutive: bool,
        any_rank: AnyRank = single_process,
    ) -> None:
        super().__init__(scale, any_rank)
        self._growth_steps = growth_steps
        self._backoff_steps = backoff_steps
        self._consecutive = consecutive
        self.clean_steps = 0
        self.bad_steps = 0

    def update(self, check: GradCheck, samples: int) -> None:
        self.clean_steps = self.clean_steps + 1 if check.finite else 0
        self.bad_steps += not check.finite
        if self._consecutive and check.finite:
            self.bad_steps = 0
        if self.bad_steps >= self._backoff_steps:
            self._change(0.5)
        elif self.clean_steps >= self._growth_steps:
            self._change(2.0)

    def _change(self, factor: float) -> None:
        self.scale = min(max(self.scale * factor, 1.0), MAX_SCALE)
        self.clean_steps = self.bad_steps = 0


class RampScaling(StaticScaling):
    """Doubles in equal parts of the run. The scale is a function of the samples seen."""

    def __init__(self, initial: float, final: float, span: tuple[int, int], any_rank: AnyRank = single_process) -> None:
        super().__init__(initial, any_rank)
        self._initial = initial
        total, epoch = span
        self._levels = int(math.log2(final // initial)) + 1
        epochs = total / epoch
        whole_epochs = epochs // self._levels
        self._period = (whole_epochs or epochs / self._levels) * epoch

    def update(self, check: GradCheck, samples: int) -> None:
        self.scale = self._initial * 2.0 ** min(self._levels - 1, int(samples // self._period))


class AutomaticScaling(StaticScaling):
    """Keeps the scale as high as the largest gradients allow."""

    PERIOD = 16
    HIGH_FRACTION = 1e-7
    skips_overflow = True
    _STATE = ("scale", "skipped", "steps", "high", "seen")

    def __init__(self, scale: float, largest: float, any_rank: AnyRank = single_process) -> None:
        super().__init__(scale, any_rank)
        self._threshold = largest / 8
        self.steps = 0
        self.high = 0
        self.seen = 0

    def observe(self, gradients: list[Tensor]) -> None:
        """Count all values, and those near the end of the range."""
        self.high += sum(int((gradient.abs() > self._threshold).sum()) for gradient in gradients)
        self.seen += sum(gradient.numel() for gradient in gradients)

    def update(self, check: GradCheck, samples: int) -> None:
        self.steps += 1
        if not check.finite:
            self._change(0.5)
        elif self.steps >= self.PERIOD:
            self._change(0.5 if self.any_rank(self.high > self.HIGH_FRACTION * self.seen) else 2.0)

    def _change(self, factor: float) -> None:
        self.scale = min(max(self.scale * factor, 1.0), AUTOMATIC_MAX_SCALE)
        self.steps = self.high = self.seen = 0


def _all_finite(gradients: Iterable[Tensor]) -> bool:
    # A sum is finite only if all its terms are; a sum of fp32 values cannot overflow in float64.
    sums = [gradient.sum(dtype=torch.float64) for gradient in gradients]
    return bool(torch.stack(sums).isfinite().all()) if sums else True


def build_scaler(
    config: PrecisionConfig, policy: Policy, span: tuple[int, int], any_rank: AnyRank = single_process
) -> Scaler:
    """Build the scaler of a config; `span` is the length of the run and of one epoch in samples."""
    model = DEVICE_MODELS[config.device_model] if config.device_model else None
    rule = config.loss_scaling_rule
    if model is not None and rule == "static" and config.loss_scaling is None:
        rule = model.loss_scaling_rule  # type: ignore[assignment]
    if policy.compute is FP32 and config.loss_scaling is None and rule == "static":
        return NoScaling()
    final = config.loss_scaling or DEFAULT_SCALE
    initial = config.initial_loss_scaling
    if rule == "dynamic":
        return DynamicScaling(
            initial or 65536.0, growth_steps=2000, backoff_steps=1, consecutive=True, any_rank=any_rank
        )
    if rule == "ascend":
        return DynamicScaling(
            initial or 2.0**32, growth_steps=1000, backoff_steps=2, consecutive=False, any_rank=any_rank
        )
    if rule == "ramp":
        return RampScaling(initial or 1.0, final, span, any_rank)
    if rule == "automatic":
        return AutomaticScaling(initial or final, policy.compute.largest, any_rank)
    return StaticScaling(final, any_rank)
