"""Early stopping and time budgets."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from convolve.config.selection import SelectBy
from convolve.engine.loop import StepEvent
from convolve.engine.metrics import EvalResult
from convolve.engine.stopping import EarlyStopCallback, TimeBudgetCallback, is_better
from convolve.loggers.base import Logger


@dataclass
class Events(Logger):
    kinds: list[str] = field(default_factory=list)

    def event(self, kind: str, **details: object) -> None:
        self.kinds.append(kind)


def step(result: EvalResult | None = None) -> StepEvent:
    state: Any = type("State", (), {"step": 3})()
    timer: Any = None
    return StepEvent(state, 0, False, False, timer, result)


def run(callback: EarlyStopCallback, accuracies: list[float]) -> list[bool]:
    stops = []
    for accuracy in accuracies:
        event = step(EvalResult(1.0, accuracy, 10))
        callback.on_step_end(event)
        stops.append(event.last)
    return stops


def test_equal_accuracies_are_compared_by_loss() -> None:
    assert is_better(EvalResult(0.4, 0.9, 10), EvalResult(0.5, 0.9, 10), "accuracy")
    assert not is_better(EvalResult(0.4, 0.8, 10), EvalResult(0.5, 0.9, 10), "accuracy")


def test_loss_alone_selects_if_asked_for() -> None:
    assert is_better(EvalResult(0.4, 0.8, 10), EvalResult(0.5, 0.9, 10), "loss")
    assert not is_better(EvalResult(0.5, 0.9, 10), EvalResult(0.5, 0.8, 10), "loss")


@pytest.mark.parametrize("select_by", ["accuracy", "loss"])
def test_any_validation_is_better_than_none_and_than_one_without_a_loss(select_by: SelectBy) -> None:
    assert is_better(EvalResult(math.inf, 0.0, 10), None, select_by)
    assert is_better(EvalResult(9.0, 0.5, 10), EvalResult(math.nan, 0.5, 10), select_by)
    assert not is_better(EvalResult(math.nan, 0.5, 10), EvalResult(9.0, 0.5, 10), select_by)


def test_run_stops_after_so_many_validations_without_improvement() -> None:
    callback = EarlyStopCallback(patience=2, logger=Events(), select_by="accuracy")
    assert run(callback, [0.5, 0.6, 0.6, 0.55]) == [False, False, False, True]


def test_steps_without_validation_do_not_count() -> None:
    callback = EarlyStopCallback(patience=1, logger=Events(), select_by="accuracy")
    run(callback, [0.5])
    event = step()
    callback.on_step_end(event)
    assert not event.last and callback.stale == 0


@pytest.mark.parametrize("cut", range(5))
def test_restored_patience_stops_at_the_same_validation(cut: int) -> None:
    accuracies = [0.5, 0.7, 0.6, 0.7, 0.6]
    first = EarlyStopCallback(patience=3, logger=Events(), select_by="accuracy")
    before = run(first, accuracies[:cut])
    second = EarlyStopCallback(patience=3, logger=Events(), select_by="accuracy")
    second.load_state_dict(first.state_dict())
    assert before + run(second, accuracies[cut:]) == [False, False, False, False, True]


def test_time_budget_stops_once_and_is_logged() -> None:
    from convolve.engine.step import StepParts

    seconds = iter([10.0, 59.0, 60.0])
    parts: Any = StepParts(schedule=lambda samples: 0.1, forward_backward=None)  # type: ignore[arg-type]
    events = Events()
    callback = TimeBudgetCallback(seconds=60, elapsed=lambda: next(seconds), parts=parts, logger=events)
    steps = [step() for _ in range(3)]
    for event in steps:
        callback.on_step_end(event)
    assert [event.stopped_early for event in steps] == [None, None, "time budget"]
    assert steps[-1].last and events.kinds == ["stopped_early"]
