"""Plots of the report: ticks, thinning, coordinates, matrices and bars, by hand-computed numbers and properties."""

import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convolve.report.calibration import Bin
from convolve.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    PlotLine,
    choose_ticks,
    draw_lines,
    draw_matrix,
    draw_reliability,
    panel,
    thin,
)


def draw(points, **options):
    return draw_lines([PlotLine("a", points)], "loss over epochs", lambda value: f"{value:g}", **options)


def parse_svg(text):
    return ET.fromstring(text[: text.index("</svg>") + 6])


def read_points(text, number=0):
    polyline = parse_svg(text).findall("polyline")[number]
    return [tuple(map(float, pair.split(","))) for pair in polyline.get("points").split()]


@settings(deadline=None)
@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6))
def test_ticks_are_few_evenly_spaced_and_inside_the_range(low, span):
    high = low + span
    ticks = choose_ticks(low, high)
    assert len(ticks) <= 6
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)
    if len(ticks) > 2:
        steps = np.diff(ticks)
        np.testing.assert_allclose(steps, steps[0], rtol=1e-3)
        assert f"{steps[0]:e}"[0] in "125" or f"{steps[0]:.0e}"[0] in "125"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.3, 0.9, [0.4, 0.6, 0.8]), (-1, 1, [-1, -0.5, 0, 0.5, 1]), (0, 7, [0, 2, 4, 6])],
)
def test_ticks_are_round_numbers(low, high, ticks):
    assert choose_ticks(low, high) == pytest.approx(ticks)


def test_an_empty_range_has_a_tick_at_its_value():
    assert choose_ticks(3, 3) == pytest.approx([3])


@settings(deadline=None)
@given(count=st.integers(0, 2000))
def test_thinning_keeps_the_ends_the_order_and_at_most_the_maximum(count):
    points = [(float(index), float(-index)) for index in range(count)]
    kept = list(thin(points))
    assert len(kept) == min(count, MAX_POINTS)
    assert kept == sorted(kept) and set(kept) <= set(points)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])


def test_the_ends_of_a_curve_are_at_the_edges_of_the_plot():
    """The margin is five percent of the range of values; the first axis starts at zero."""
    (x1, y1), (x2, y2) = read_points(draw([(0, 10), (4, 20)]))
    assert (x1, x2) == (LEFT, WIDTH - RIGHT)
    inner = HEIGHT - TOP - BOTTOM
    assert y1 == pytest.approx(HEIGHT - BOTTOM - inner * 0.5 / 11, abs=0.06)
    assert y2 == pytest.approx(TOP + inner * 0.5 / 11, abs=0.06)


def test_a_logarithmic_plot_places_powers_at_equal_distances():
    (_, a), (_, b), (_, c) = read_points(draw([(0, 0.1), (1, 1), (2, 10)], log=True))
    assert a - b == pytest.approx(b - c, abs=0.11)
    assert a > b > c


@pytest.mark.parametrize("points", [[(0, 1), (1, 2), (2, 3)], [(0, 0), (1, 1), (2, 2000)]], ids=["narrow", "zero"])
def test_narrow_ranges_and_zeros_are_drawn_linearly(points):
    assert read_points(draw(points, log=True)) == read_points(draw(points))


@settings(deadline=None, max_examples=50)
@given(
    values=st.lists(st.floats(-1e9, 1e9, width=32, allow_subnormal=False), min_size=1, max_size=20), log=st.booleans()
)
def test_every_curve_stays_inside_its_axes(values, log):
    for x, y in read_points(draw([(float(index), value) for index, value in enumerate(values)], log=log)):
        assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1 and TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1


def test_faint_lines_have_no_dots_unless_they_are_one_point():
    both = [(0, 1), (1, 2)]
    lines = {faint: draw_lines([PlotLine("a", both, faint=faint)], "x", str) for faint in (False, True)}
    assert [text.count("<circle") for text in lines.values()] == [2, 0]
    assert draw_lines([PlotLine("a", both[:1], faint=True)], "x", str).count("<circle") == 1


def test_lines_without_points_are_not_in_the_legend():
    text = draw_lines([PlotLine("full", [(0, 1)]), PlotLine("empty", [])], "x", str)
    assert "full</span>" in text and "empty" not in text


def test_marks_are_ticks_at_the_bottom_and_in_the_legend():
    text = draw([(0, 1), (10, 2)], marks=PlotLine("skipped", [(0, 0), (10, 0)], 2))
    bottom = HEIGHT - BOTTOM
    assert f'd="M{LEFT:.1f},{bottom}v-14M{WIDTH - RIGHT:.1f},{bottom}v-14"' in text
    assert "skipped</span>" in text


def test_labels_cannot_become_markup():
    text = draw_lines([PlotLine("<b>", [(0, 1)])], 'a"<i>', str) + panel("<u>", "")
    assert "<b>" not in text and "<i>" not in text and "<u>" not in text
    assert parse_svg(text).get("aria-label") == 'a"<i>'


def test_bars_of_a_reliability_plot_have_the_height_of_the_accuracy():
    bins = [Bin(0, 0.0, 0.0), Bin(10, 0.75, 0.5)]
    bars = parse_svg(draw_reliability(bins)).findall("rect")
    assert len(bars) == 1, "an empty bin has no bar"
    inner = HEIGHT - TOP - BOTTOM
    assert float(bars[0].get("height")) == pytest.approx(inner * 0.5, abs=0.06)
    assert float(bars[0].get("x")) == pytest.approx(LEFT + (WIDTH - LEFT - RIGHT) / 2 + 1, abs=0.06)
    assert bars[0].find("title").text == "10 images: confidence 75.0%, accuracy 50.0%"


def test_a_matrix_is_shaded_by_the_fraction_of_its_row():
    matrix = np.array([[8, 2, 0], [0, 0, 0], [1, 0, 9]])
    text = draw_matrix(matrix, ["cat", "<dog>", "bird"])
    assert "&lt;dog&gt;" in text and "<dog>" not in text
    cells = re.findall(r'<td class="(right|wrong)" style="--s:([\d.]+)">(\d*)</td>', text)
    assert cells == [
        ("right", "0.80", "8"), ("wrong", "0.80", "2"), ("wrong", "0.00", ""),
        ("wrong", "0.00", ""), ("right", "0.00", ""), ("wrong", "0.00", ""),
        ("wrong", "0.40", "1"), ("wrong", "0.00", ""), ("right", "0.90", "9"),
    ]  # fmt: skip


def test_plots_of_single_values_have_finite_coordinates():
    for value in (0.0, -3.0, 1e-300, 1e300):
        assert all(math.isfinite(number) for point in read_points(draw([(0, value)], log=True)) for number in point)
