"""Callbacks that log, validate and check weights, with fake loggers and an injected clock."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from convolve.config import ModelConfig
from convolve.config.loading import build as make_config
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.loader.loader import Loader
from convolve.data.transforms.augment import NO_AUGMENT
from convolve.data.transforms.normalize import Transform
from convolve.distributed.collectives import SingleProcess
from convolve.engine.callbacks import (
    IntervalTrigger,
    LogCallback,
    ProgressCallback,
    ValidateCallback,
    WeightCheckCallback,
    validation_record,
)
from convolve.engine.ema import ModelEMA
from convolve.engine.loop import StepEvent
from convolve.engine.metrics import EvalResult
from convolve.engine.state import TrainState
from convolve.engine.step import StepParts
from convolve.engine.throughput import Timer
from convolve.errors import DivergedError, ParallelError
from convolve.loggers.base import SilentConsole
from convolve.models import registry
from thread_collectives import run_ranks

CPU = torch.device("cpu")
EVERY_TEN = IntervalTrigger(Fraction(10), 100)


class Records(SilentConsole):
    """A logger and console that keeps everything."""

    def __init__(self):
        self.training, self.validations, self.positions = [], [], []

    def train(self, record):
        self.training.append(record)

    def valid(self, record):
        self.validations.append(record)

    def progress(self, name, now, total):
        self.positions.append((name, now, total))


class FakeMetrics:
    """Returns prepared results."""

    def __init__(self, *results):
        self.results = list(results)

    def update(self, loss, logits, labels):
        pass

    def compute(self):
        return self.results.pop(0)


class FakeLoader:
    """A training loader of fifty samples that waited for its data."""

    waited_seconds = 1.5

    def __len__(self):
        return 50


def make_parts(**options):
    return StepParts(schedule=lambda samples: 0.1 + samples, forward_backward=None, **options)


def step_event(step, before, samples, *, last=False, seconds=3.0):
    now = [0.0]
    timer = Timer(lambda: now[0], previous_seconds=20.0)
    now[0] = seconds
    return StepEvent(SimpleNamespace(step=step, samples=samples), before, last, False, timer)


def log_callback(logger, *results):
    parts = make_parts(metrics=FakeMetrics(*results))
    return LogCallback(trigger=EVERY_TEN, parts=parts, loader=FakeLoader(), logger=logger)


def test_a_log_point_has_position_metrics_learning_rate_and_throughput():
    logger = Records()
    callback = log_callback(logger, EvalResult(0.75, 0.5, 25))
    callback.on_step_end(step_event(5, 20, 25, last=True))
    (record,) = logger.training
    assert (record.step, record.samples, record.epoch) == (5, 25, 0.5)
    assert record.learning_rate == 20.1, "the learning rate of the step, not of the next one"
    assert (record.loss, record.accuracy) == (0.75, 0.5)
    assert (record.images_per_second, record.ms_per_step) == (25 / 3.0, 600.0)
    assert (record.data_wait_share, record.total_seconds) == (0.5, 23.0)
    assert callback.final_loss == 0.75


def test_steps_between_log_points_are_not_logged_and_keep_the_metrics():
    logger = Records()
    callback = log_callback(logger, EvalResult(0.75, 0.5, 25))
    callback.on_step_end(step_event(1, 0, 9))
    assert logger.training == [] and math.isnan(callback.final_loss)
    callback.on_step_end(step_event(2, 9, 18))
    assert [record.step for record in logger.training] == [2]


def test_without_metrics_loss_and_accuracy_are_absent():
    logger = Records()
    log_callback(logger, EvalResult(math.nan, math.nan, 0)).on_step_end(step_event(1, 0, 10))
    assert (logger.training[0].loss, logger.training[0].accuracy) == (None, None)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_with_a_remedy(loss):
    logger = Records()
    with pytest.raises(DivergedError, match=rf"loss={loss} at step 7: .* lower --learning-rate"):
        log_callback(logger, EvalResult(loss, 0.1, 10)).on_step_end(step_event(7, 60, 70))
    assert logger.training == []


def test_progress_is_shown_after_each_step():
    console = Records()
    for before in (0, 7):
        ProgressCallback(console, 100).on_step_end(step_event(1, before, before + 7))
    assert console.positions == [("train", 7, 100), ("train", 14, 100)]


def test_a_validation_record_has_the_throughput():
    record = validation_record("step-3", 3, 1.5, EvalResult(0.2, 0.9, 400), 8.0)
    assert (record.checkpoint, record.step, record.epoch) == ("step-3", 3, 1.5)
    assert (record.loss, record.accuracy, record.samples) == (0.2, 0.9, 400)
    assert (record.seconds, record.images_per_second) == (8.0, 50.0)


def make_validation(ema_decay=None):
    network = registry.build("lenet5", classes=10, input_shape=(1, 28, 28), seed=1, options=ModelConfig())
    state = TrainState(network, None, step=4, samples=20)
    if ema_decay is not None:
        state.ema = ModelEMA(network, ema_decay)
    draw = np.random.default_rng(0)
    split = InMemoryImages(draw.integers(0, 256, (30, 28, 28, 1), np.uint8), draw.integers(0, 10, 30))
    transform = Transform(28, 28, (0.5,), (0.5,))
    loader = Loader(split.fetcher(transform, NO_AUGMENT, CPU), transform, CPU)
    logger, seconds = Records(), iter(range(100))
    callback = ValidateCallback(
        trigger=EVERY_TEN,
        parts=make_parts(),
        loader=loader,
        samples_per_epoch=40,
        logger=logger,
        config=make_config({"model": "lenet5"}),
    )
    return callback, state, logger, Timer(lambda: float(next(seconds)))


def test_a_validation_is_logged_with_its_checkpoint_and_set_in_the_event():
    callback, state, logger, timer = make_validation()
    event = StepEvent(state, 10, False, False, timer)
    callback.on_step_end(event)
    (record,) = logger.validations
    assert (record.checkpoint, record.step, record.epoch, record.samples) == ("step-000000004", 4, 0.5, 30)
    assert record.seconds == 1.0 and record.images_per_second == 30.0
    assert event.validation == EvalResult(record.loss, record.accuracy, 30)


def test_a_step_that_is_not_due_is_not_validated():
    callback, state, logger, timer = make_validation()
    event = StepEvent(state, 20, True, True, timer)
    callback.on_step_end(event)
    assert logger.validations == [] and event.validation is None


def test_an_average_is_validated_too_and_does_not_replace_the_result():
    callback, state, logger, timer = make_validation(ema_decay=0.5)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(0.05)
    weights = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    event = StepEvent(state, 10, False, False, timer)
    callback.on_step_end(event)
    assert [record.checkpoint for record in logger.validations] == ["step-000000004", "step-000000004-ema"]
    assert logger.validations[0].loss != logger.validations[1].loss
    assert event.validation.loss == logger.validations[0].loss
    assert all(torch.equal(weights[name], tensor) for name, tensor in state.model.state_dict().items())


def test_replicas_with_different_weights_are_an_error_on_all_ranks():
    def check(weight):
        def run(collectives):
            model = torch.nn.Linear(1, 1)
            with torch.no_grad():
                model.weight.fill_(weight(collectives.topology.rank))
                model.bias.zero_()
            callback = WeightCheckCallback(trigger=EVERY_TEN, parts=make_parts(collectives=collectives))
            event = step_event(1, 0, 10)
            event.state.model = model
            callback.on_step_end(event)

        return run_ranks(run)

    assert check(lambda rank: 1.0) == [None, None]
    assert all(isinstance(result, ParallelError) for result in check(lambda rank: 1.0 + rank))


def test_weights_are_not_compared_between_log_points():
    callback = WeightCheckCallback(trigger=EVERY_TEN, parts=make_parts(collectives=SingleProcess()))
    callback.on_step_end(step_event(1, 0, 9))
