from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from convolve.distributed.collectives import SingleProcess
from convolve.engine.callbacks import IntervalTrigger, LossScaleCallback, SaveCallback
from convolve.engine.loop import StepEvent
from convolve.engine.metrics import EvalResult
from convolve.engine.step import StepParts
from convolve.engine.throughput import Timer
from convolve.loggers.base import SilentConsole
from convolve.numerics.loss_scaling import NoScaling

sizes = st.integers(1, 97)


@settings(deadline=None)
@given(batch=sizes, every=st.fractions(Fraction(1, 3), 500), total=st.integers(100, 5000))
def test_every_multiple_is_due_exactly_once_for_any_batch_size(batch, every, total):
    trigger = IntervalTrigger(every, total)
    positions = list(range(0, total, batch)) + [total]
    due = [now for before, now in zip(positions, positions[1:], strict=False) if trigger.due(before, now)]
    steps = {-(-(k * every) // batch) for k in range(1, int(total / every) + 1)}
    assert due[-1] == total
    assert len(due) == len({min(step * batch, total) for step in steps} | {total})


def test_without_an_interval_only_the_end_is_due():
    trigger = IntervalTrigger(None, 100)
    assert not trigger.due(0, 99)
    assert trigger.due(99, 100)


class EventLog(SilentConsole):
    """A logger that keeps events."""

    def __init__(self):
        self.events = []

    def event(self, kind, **values):
        self.events.append((kind, values))


class FakeState:
    """A state whose snapshot is its metadata."""

    def __init__(self, step, samples):
        self.step, self.samples, self.scaler = step, samples, NoScaling()

    def snapshot(self, metadata, collectives):
        return SimpleNamespace(step=self.step, metadata=metadata)


class FakeSaver:
    """Finishes each save when it is asked to wait."""

    def __init__(self):
        self.saved, self._pending = [], None

    def save(self, snapshot, *, best):
        self.saved.append((snapshot.step, best, snapshot.metadata))
        self._pending = Path(f"step-{snapshot.step:09d}")

    def poll(self, *, wait):
        path, self._pending = (self._pending, None) if wait else (None, self._pending)
        return path


def parts(**given):
    return StepParts(schedule=lambda samples: 0.1, forward_backward=None, collectives=SingleProcess(), **given)


def save_callback(saver, logger):
    trigger = IntervalTrigger(Fraction(10), 100)
    return SaveCallback(
        trigger=trigger, parts=parts(), saver=saver, metadata={"classes": []}, logger=logger, select_by="accuracy"
    )


def step_event(step, samples, *, accuracy=None, last=False):
    validation = None if accuracy is None else EvalResult(0.5, accuracy, 8)
    return StepEvent(FakeState(step, samples), samples - 10, last, False, Timer(lambda: 7.0), validation)


def test_a_checkpoint_contains_the_validation_of_its_step_and_the_best_is_marked():
    saver = FakeSaver()
    callback = save_callback(saver, EventLog())
    for event in (step_event(1, 10, accuracy=0.5), step_event(2, 20, accuracy=0.4), step_event(3, 30)):
        callback.on_step_end(event)
    assert [(step, best) for step, best, _ in saver.saved] == [(1, True), (2, False), (3, False)]
    assert saver.saved[1][2]["metrics"] == {"loss": 0.5, "accuracy": 0.4, "samples": 8}
    assert saver.saved[2][2]["metrics"] == {} and saver.saved[2][2]["best_accuracy"] == 0.5


def test_a_finished_save_is_logged_once_and_the_last_step_waits_for_it():
    logger = EventLog()
    callback = save_callback(FakeSaver(), logger)
    callback.on_step_end(step_event(1, 10))
    assert logger.events == []
    callback.on_step_end(step_event(2, 15, last=True))
    assert [values["step"] for _, values in logger.events] == [1, 2]


def test_a_change_of_the_loss_scale_and_a_skipped_step_are_logged():
    logger, state = EventLog(), FakeState(1, 10)
    state.scaler = SimpleNamespace(scale=8.0, skipped=0)
    callback = LossScaleCallback(logger, state.scaler)
    event = StepEvent(state, 0, False, False, Timer())
    callback.on_step_end(event)
    assert logger.events == []
    state.scaler.scale, state.scaler.skipped = 4.0, 1
    callback.on_step_end(event)
    assert [kind for kind, _ in logger.events] == ["skipped_step", "loss_scale"]
    assert logger.events[0][1]["loss_scale"] == 8.0 and logger.events[1][1]["loss_scale"] == 4.0
