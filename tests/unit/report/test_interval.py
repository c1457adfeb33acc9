"""Confidence intervals of accuracies."""

import pytest

from convolve.report.interval import confidence_interval, half_width


@pytest.mark.parametrize(
    ("correct", "count", "ends"), [(273, 300, (0.8723, 0.9374)), (10, 10, (0.7225, 1.0)), (0, 10, (0.0, 0.2775))]
)
def test_the_interval_is_the_one_of_wilson(correct: int, count: int, ends: tuple[float, float]) -> None:
    assert confidence_interval(correct / count, count) == pytest.approx(ends, abs=5e-4)


@pytest.mark.parametrize("accuracy, count, half", [(0.5, 100, 0.096), (1.0, 10, 0.139), (0.0, 10, 0.139)])
def test_half_of_the_width_is_printed_after_a_run(accuracy: float, count: int, half: float) -> None:
    assert half_width(accuracy, count) == pytest.approx(half, abs=5e-4)
