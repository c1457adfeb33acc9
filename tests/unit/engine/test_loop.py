"""The loop: its length in samples, the order of callbacks, the event they receive, and requests to stop."""

import os
import signal
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from convolve.config.loading import build as make_config
from convolve.data.loader.loader import MicroBatch, StepBatch
from convolve.distributed.gradient_sync import NoSync
from convolve.distributed.stop_votes import SummedVotes
from convolve.engine.callbacks import IntervalTrigger, log_trigger, save_trigger
from convolve.engine.loop import SIGNALS, StopRequest, fit, run_samples, samples_after_steps, stop_on_signals
from convolve.engine.metrics import EvalResult
from convolve.engine.state import TrainState
from convolve.engine.step import StepParts
from convolve.engine.throughput import Timer
from convolve.models.network import Network
from thread_collectives import run_ranks


class NoPasses:
    """Computes no gradients, which keeps the loop itself."""

    def run(self, batch, step, scale):
        pass


def make_state(samples=0):
    network = Network({"fc": nn.Linear(2, 2)}, input_shape=(2,))
    return TrainState(network, torch.optim.SGD(network.parameters(), lr=0.1), samples=samples)


def step_batches(count, size=10):
    labels = torch.zeros(size, dtype=torch.int64)
    for _ in range(count):
        yield StepBatch((MicroBatch(torch.zeros(size, 2), labels, 0),), size)


def make_parts(**options):
    return StepParts(schedule=lambda samples: 0.1, forward_backward=NoPasses(), **options)


class Recorder:
    def __init__(self, name, calls, timed=True):
        self.name, self.calls, self.timed = name, calls, timed

    def on_step_end(self, event):
        self.calls.append((self.name, event.state.step, event.samples_before, event.state.samples, event.last))


def test_callbacks_run_after_every_step_in_order_and_the_last_step_is_marked():
    calls = []
    callbacks = [Recorder("log", calls), Recorder("validate", calls, timed=False), Recorder("save", calls)]
    event = fit(make_state(), step_batches(9), make_parts(), callbacks, total=20)
    assert calls == [
        *((name, 1, 0, 10, False) for name in ("log", "validate", "save")),
        *((name, 2, 10, 20, True) for name in ("log", "validate", "save")),
    ]
    assert event.last and not event.stopped and event.state.samples == 20


def test_callbacks_of_a_step_receive_one_event_and_later_ones_see_the_validation():
    seen = []

    class Validate:
        timed = False

        def on_step_end(self, event):
            assert event.validation is None
            event.validation = EvalResult(0.5, 0.25, event.state.step)

    save = SimpleNamespace(timed=True, on_step_end=lambda event: seen.append(event.validation))
    fit(make_state(), step_batches(3), make_parts(), [Validate(), save], total=30)
    assert [result.samples for result in seen] == [1, 2, 3]


def test_an_error_in_a_callback_ends_the_run_and_resumes_the_timer():
    now = [0.0]
    timer = Timer(lambda: now[0])

    def fail(event):
        now[0] += 3.0
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fit(
            make_state(),
            step_batches(3),
            make_parts(),
            [SimpleNamespace(timed=False, on_step_end=fail)],
            total=30,
            timer=timer,
        )
    now[0] += 1.0
    assert timer.seconds == 1.0


def test_a_complete_run_takes_no_step():
    calls = []
    state = make_state(samples=30)
    assert fit(state, step_batches(3), make_parts(), [Recorder("log", calls)], total=30) is None
    assert calls == [] and state.step == 0


def test_a_run_ends_with_its_data():
    assert not fit(make_state(), step_batches(2), make_parts(), [], total=100).last
    assert fit(make_state(), step_batches(0), make_parts(), [], total=100) is None


def test_the_model_trains_even_if_it_was_evaluated_before():
    state = make_state()
    state.model.eval()
    fit(state, step_batches(1), make_parts(), [], total=10)
    assert state.model.training


@pytest.mark.parametrize(("replicas", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_one_process_that_asks_to_stop_stops_all_after_the_same_step(replicas, stages):
    class Sync(NoSync):
        """Sums the payload of a step over replicas."""

        def __init__(self, collectives):
            self.collectives = collectives

        def finish(self, payload):
            return self.collectives.sum_over_replicas(payload[0])

    def train(collectives):
        request = StopRequest()
        if collectives.topology.rank == collectives.topology.world - 1:
            request(signal.SIGTERM, None)
        votes = SummedVotes(collectives)
        parts = make_parts(collectives=collectives, grad_sync=Sync(collectives), stop_votes=votes)
        event = fit(make_state(), step_batches(5), parts, [], total=50, stop=request)
        return event.stopped, event.state.step

    assert run_ranks(train, replicas, stages) == [(True, 1)] * (replicas * stages)


def test_the_first_signal_is_recorded_and_the_second_one_interrupts():
    request = StopRequest()
    assert request.signal is None
    request(signal.SIGTERM, None)
    assert request.signal is signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        request(signal.SIGINT, None)
    assert request.signal is signal.SIGTERM


def test_handlers_are_restored_after_the_block_even_after_an_error():
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(ValueError, match="wrong"), stop_on_signals() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signal is signal.SIGTERM
        raise ValueError("wrong")
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_length_of_a_run_follows_epochs_steps_or_the_default():
    options = {"model": "lenet5", "batch_size": 8}
    assert run_samples(make_config({**options, "epochs": 2.5}), 100) == 250
    assert run_samples(make_config({**options, "epochs": 0.001}), 100) == 1
    assert run_samples(make_config(options), 100) == 500
    assert run_samples(make_config({**options, "iterations": 3}), 100) == 24
    assert run_samples(make_config({**options, "iterations": 13}), 100) == 100
    assert run_samples(make_config({**options, "iterations": 14}), 100) == 108


@settings(deadline=None, max_examples=60)
@given(batch=st.integers(1, 40), accumulation=st.integers(1, 4), epoch=st.integers(1, 300), steps=st.integers(0, 60))
def test_the_position_after_a_number_of_steps_is_that_of_walking_them(batch, accumulation, epoch, steps):
    config = make_config({"model": "lenet5", "batch_size": batch, "gradient_accumulation_count": accumulation})
    position = 0
    for _ in range(steps):
        rest = epoch - position % epoch
        position += min(batch * accumulation, rest)
    assert samples_after_steps(steps, config, epoch) == position


def test_log_points_are_per_epoch_or_per_step():
    options = {"model": "lenet5", "batch_size": 8, "gradient_accumulation_count": 2}
    assert log_trigger(make_config({**options, "logs_per_epoch": 3}), 100, 500) == IntervalTrigger(
        Fraction(100, 3), 500
    )
    assert log_trigger(make_config({**options, "log_freq": 5}), 100, 500) == IntervalTrigger(Fraction(80), 500)


def test_checkpoints_are_per_epoch_every_few_epochs_or_only_at_the_end():
    options = {"model": "lenet5"}
    assert save_trigger(make_config({**options, "ckpts_per_epoch": 4}), 100, 500).every == 25
    assert save_trigger(make_config({**options, "epochs_per_ckpt": 3}), 100, 500).every == 300
    assert save_trigger(make_config({**options, "ckpts_per_epoch": 0}), 100, 500).every is None
