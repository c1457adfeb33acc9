import math

import pytest

from convolve.config import ScheduleConfig
from convolve.optim.schedules import Span, build_schedule

SPAN = Span(total=1000, epoch=100)


def rates(at, **options):
    schedule = build_schedule(ScheduleConfig(**options), 2.0, SPAN)
    return [schedule(samples) for samples in at]


def test_constant_never_changes():
    assert rates([0, 500, 1000]) == [2.0, 2.0, 2.0]


def test_stepped_drops_after_each_share_of_the_run():
    found = rates([0, 500, 501, 750, 751, 999], lr_schedule="stepped", learning_rate_decay=0.1)
    assert found == pytest.approx([2.0, 2.0, 0.2, 0.2, 0.02, 0.02])


def test_cosine_spans_the_whole_run():
    expected = [2.0 * 0.5 * (1 + math.cos(math.pi * s / 1000)) for s in (0, 250, 500, 1000)]
    assert rates([0, 250, 500, 1000], lr_schedule="cosine") == pytest.approx(expected)


def test_exponential_makes_whole_drops():
    found = rates([0, 99, 100, 250], lr_schedule="exponential", lr_decay_rate=0.5, lr_drops=10)
    assert found == pytest.approx([2.0, 2.0, 1.0, 0.5])


def test_smooth_exponential_is_the_power_itself():
    found = rates([50], lr_schedule="exponential", lr_decay_rate=0.5, lr_drops=10, lr_staircase=False)
    assert found == pytest.approx([2.0 * 0.5**0.5])


def test_polynomial_rises_to_the_peak_and_ends_at_its_ratio():
    options = {"lr_schedule": "polynomial", "warmup_epochs": 2, "poly_lr_decay_power": 2, "poly_lr_end_ratio": 0.1}
    found = rates([0, 100, 200, 600, 1000, 1100], **options)
    assert found == pytest.approx([0.0, 1.0, 2.0, 0.2 + 1.8 * 0.25, 0.2, 0.2])


@pytest.mark.parametrize("shape", ["constant", "stepped", "cosine", "exponential"])
def test_warmup_multiplies_the_schedule_by_the_share_done(shape):
    warm = rates([0, 50, 150, 200, 300], lr_schedule=shape, warmup_epochs=2)
    cold = rates([0, 50, 150, 200, 300], lr_schedule=shape)
    assert warm == pytest.approx([c * w for c, w in zip(cold, [0, 0.25, 0.75, 1, 1], strict=True)])
