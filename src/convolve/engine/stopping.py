"""End a run before its planned length: validation stops improving, or its time is over.

What a callback here decides is stored in the checkpoint of the same step, so a resumed run decides the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from convolve.config.selection import SelectBy, rank
from convolve.engine.loop import StepEvent
from convolve.engine.metrics import EvalResult
from convolve.engine.step import StepParts
from convolve.errors import CheckpointError
from convolve.loggers.base import Logger


def is_better(result: EvalResult, best: EvalResult | None, select_by: SelectBy) -> bool:
    """Compare two validations; any is better than none."""
    return best is None or rank(result.score, result.loss, select_by) > rank(best.score, best.loss, select_by)


@dataclass(kw_only=True)
class EarlyStopCallback:
    """Ends the run after `patience` validations in a row without improvement."""

    patience: int
    logger: Logger
    select_by: SelectBy
    best: EvalResult | None = None
    stale: int = 0
    timed: bool = True

    def on_step_end(self, event: StepEvent) -> None:
        result = event.validation
        if result is None:
            return
        better = is_better(result, self.best, self.select_by)
        self.best, self.stale = (result, 0) if better else (self.best, self.stale + 1)
        if self.stale >= self.patience and not event.last:
            event.last, event.stopped_early = True, "no improvement"
            self.logger.event("stopped_early", step=event.state.step, reason=event.stopped_early)

    def state_dict(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        return self.state_of(self.best, self.stale)

    @staticmethod
    def state_of(best: EvalResult | None, stale: int = 0) -> dict[str, Any]:
        """Return the values for a checkpoint after a number of validations without improvement."""
        return {"best": best and best.to_json(), "stale": stale}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Continue from the values of a checkpoint."""
        try:
            best = stored.get("best")
            self.best = best and EvalResult.from_json(best)
            self.stale = int(stored.get("stale", 0))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise CheckpointError(f"state has early_stop={stored!r:.40}: not one of early stopping") from None


@dataclass(frozen=True, kw_only=True)
class TimeBudgetCallback:
    """Ends the run when its time is over, on all ranks after the same step."""

    seconds: float
    elapsed: Callable[[], float]
    parts: StepParts
    logger: Logger
    timed: bool = True

    def on_step_end(self, event: StepEvent) -> None:
        if self.parts.collectives.any_rank(self.elapsed() >= self.seconds) and not event.last:
            event.last, event.stopped_early = True, "time budget"
            self.logger.event("stopped_early", step=event.state.step, reason=event.stopped_early)
