"""Slow steps are announced after their first micro batch."""

import pytest
import torch

from convolve.config import ModelConfig
from convolve.data.loader.loader import MicroBatch, StepBatch
from convolve.engine.forward_backward import ForwardBackward, PassContext, with_pace
from convolve.engine.metrics import CrossEntropy
from convolve.engine.pace import SlowStepNotice, format_duration
from convolve.models import registry


class Clock:
    """Every micro batch takes `seconds`: the clock advances at each reading."""

    def __init__(self, seconds):
        self.seconds, self.now = seconds, 0.0

    def __call__(self):
        self.now += self.seconds
        return self.now


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [
        (31.0, ["a step will take about 1.0 minutes (2 micro batches), the remaining 300 steps about 5.2 hours"]),
        (29.0, []),
    ],
)
def test_a_step_of_more_than_a_minute_is_announced_once(seconds, lines):
    printed = []
    model = registry.build("lenet-bn", classes=10, input_shape=(1, 28, 28), seed=0, options=ModelConfig())
    passes = ForwardBackward(model=model, loss=CrossEntropy(), context=PassContext(0))
    passes = with_pace(passes, SlowStepNotice(printed.append, 300, Clock(seconds)))
    halves = tuple(MicroBatch(torch.randn(2, 1, 28, 28), torch.tensor([1, 2]), first) for first in (0, 2))
    for step in (1, 2):
        passes.run(StepBatch(halves, 4), step, 1.0)
    assert printed == lines


def test_durations_have_a_readable_unit():
    assert [format_duration(seconds) for seconds in (61, 7200, 86400 * 3)] == ["1.0 minutes", "2.0 hours", "3.0 days"]
