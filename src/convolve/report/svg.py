"""Plots as inline SVG without scripts, fonts or external files; colors come from the style of the page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from convolve.report.calibration import Bin

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 36
MAX_POINTS = 300
COLORS = 6


@dataclass(frozen=True)
class PlotLine:
    """One curve; `color` is an index into the palette of the page, `faint` lines are thin and have no markers."""

    name: str
    points: Points
    color: int = 0
    faint: bool = False


def thin(points: Points) -> Points:
    """Return at most `MAX_POINTS` points, including the first and the last."""
    if len(points) <= MAX_POINTS:
        return points
    indices = np.unique(np.linspace(0, len(points) - 1, MAX_POINTS).round().astype(int))
    return [points[index] for index in indices]


def choose_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that cover a range."""
    span = high - low or 1.0
    step = 10 ** math.floor(math.log10(span / count))
    step *= next((factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count), 10)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Axes:
    """Axis ranges, and the coordinates of values in the drawing."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False

    def across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low or 1.0)

    def down(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (*self.y, value))
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low or 1.0)

    def ticks_down(self) -> list[float]:
        if not self.log:
            return choose_ticks(*self.y)
        powers = range(math.floor(math.log10(self.y[0])), math.ceil(math.log10(self.y[1])) + 1)
        marks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        inside = [mark for mark in marks if self.y[0] <= mark <= self.y[1]]
        return inside if len(inside) <= 7 else [mark for mark in inside if f"{mark:e}"[0] == "1"]


def draw_lines(
    lines: Sequence[PlotLine],
    label: str,
    format_tick: Callable[[float], str],
    *,
    log: bool = False,
    across: str = "epoch",
    marks: PlotLine | None = None,
) -> str:
    """Plot curves; `label` is for screen readers, `marks` are drawn as ticks at the bottom."""
    lines = [PlotLine(line.name, thin(line.points), line.color, line.faint) for line in lines if line.points]
    values = [y for line in lines for _, y in line.points]
    if not values:
        return f'<p class="none">{escape(label)}: no data</p>'
    log = log and min(values) > 0 and max(values) / min(values) > 20
    frame = _Axes((0.0, max(x for line in lines for x, _ in line.points)), _range(values, log), log)
    body = [_axes(frame, format_tick, across), *(_curve(frame, line) for line in lines)]
    if marks is not None and marks.points:
        body.append(_ticks(frame, marks))
        lines.append(marks)
    return _wrap(body, label) + _legend(lines)


def _ticks(frame: _Axes, marks: PlotLine) -> str:
    """Draw short strokes that rise from the bottom."""
    bottom = HEIGHT - BOTTOM
    strokes = "".join(f"M{frame.across(x):.1f},{bottom}v-14" for x, _ in thin(marks.points))
    return f'<path class="line c{marks.color % COLORS}" d="{strokes}"/>'


def _range(values: Sequence[float], log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        return low / 1.1, high * 1.1
    margin = 0.05 * (high - low or abs(high) or 1.0)
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


def _axes(frame: _Axes, format_tick: Callable[[float], str], across: str) -> str:
    parts = []
    for value in frame.ticks_down():
        y = frame.down(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_tick(value)}</text>')
    for value in choose_ticks(*frame.x):
        x = frame.across(value)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{across}</text>')
    return "".join(parts)


def _curve(frame: _Axes, line: PlotLine) -> str:
    coordinates = [(frame.across(x), frame.down(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in coordinates)
    color = f"c{line.color % COLORS}"
    drawn = f'<polyline class="line {color}{" faint" if line.faint else ""}" points="{path}"/>'
    if line.faint and len(coordinates) > 1:
        return drawn
    return drawn + "".join(f'<circle class="dot {color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in coordinates)


def _legend(lines: Sequence[PlotLine]) -> str:
    kinds = [f"swatch c{line.color % COLORS}{' faint' if line.faint else ''}" for line in lines]
    items = "".join(
        f'<span><i class="{kind}"></i>{escape(line.name)}</span>' for kind, line in zip(kinds, lines, strict=True)
    )
    return f'<p class="legend">{items}</p>'


def draw_reliability(bins: Sequence[Bin]) -> str:
    """Plot accuracy over confidence; the bars of a calibrated model end at the diagonal."""
    frame = _Axes((0.0, 1.0), (0.0, 1.0))
    width = (frame.across(1.0) - frame.across(0.0)) / max(len(bins), 1)
    parts = [_axes(frame, lambda value: f"{value:.0%}", "confidence")]
    for index, entry in enumerate(bins):
        if entry.images:
            left, top = frame.across(index / len(bins)), frame.down(entry.accuracy)
            parts.append(
                f'<rect class="bar" x="{left + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" '
                f'height="{frame.down(0.0) - top:.1f}"><title>{entry.images} images: '
                f"confidence {entry.confidence:.1%}, accuracy {entry.accuracy:.1%}</title></rect>"
            )
    ends = f'x1="{frame.across(0)}" y1="{frame.down(0)}" x2="{frame.across(1)}" y2="{frame.down(1)}"'
    parts.append(f'<line class="diagonal" {ends}/>')
    return _wrap(parts, "accuracy over confidence")


def draw_matrix(matrix: npt.NDArray[np.int64], names: Sequence[str]) -> str:
    """Return a confusion matrix as a table whose cells are shaded by their fraction of the row."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = []
    for truth, counts in enumerate(matrix):
        total = max(int(counts.sum()), 1)
        cells = "".join(
            _cell(int(count), count / total, truth == prediction) for prediction, count in enumerate(counts)
        )
        rows.append(f'<tr><th scope="row">{escape(names[truth])}</th>{cells}</tr>')
    return f'<table class="matrix"><tr><td class="corner">truth \\ prediction</td>{head}</tr>{"".join(rows)}</table>'


def _cell(count: int, fraction: float, correct: bool) -> str:
    kind = "right" if correct else "wrong"
    shade = min(1.0, fraction if correct else 4 * fraction)
    return f'<td class="{kind}" style="--s:{shade:.2f}">{count or ""}</td>'


def panel(name: str, inner: str) -> str:
    """Return a plot with its heading."""
    return f"<figure><figcaption>{escape(name)}</figcaption>{inner}</figure>"


def _wrap(parts: Sequence[str], label: str) -> str:
    inner = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label, quote=True)}">{inner}</svg>'
