"""Curves of a run as an image: loss, accuracy and learning rate over epochs, from the tables in the run folder.

Uses matplotlib's objects with the Agg canvas, without pyplot: no window, no global state, no user style.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from convolve.errors import ConvolveError
from convolve.files import write_file
from convolve.loggers.files import Points, read_points, read_table
from convolve.run_files import CURVES_FILE, TRAINING_FILE, VALIDATION_FILE

_TRAINING = "#4c78a8"
_VALIDATION = "#e4572e"
_RATE = "#5b8c5a"
_INK = "#333333"
_WIDE_RANGE = 20


def draw_curves(folder: Path) -> Path:
    """Draw curves.png in a run folder from its training.csv and validation.csv, and return its path."""
    training, validation = folder / TRAINING_FILE, folder / VALIDATION_FILE
    if not read_table(training) and not read_table(validation):
        raise ConvolveError(f"{folder}: {TRAINING_FILE} and {VALIDATION_FILE} have no rows; nothing to draw")
    figure = Figure(figsize=(8, 9), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    loss, accuracy, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.6))
    figure.suptitle(folder.resolve().name, color=_INK, fontsize=13, parse_math=False)
    _draw_loss(loss, read_points(training, "loss"), read_points(validation, "loss"))
    _draw_accuracy(accuracy, read_points(training, "accuracy"), read_points(validation, "accuracy"))
    _draw_rate(rate, read_points(training, "learning_rate"))
    png = io.BytesIO()
    figure.savefig(png, format="png")
    write_file(folder / CURVES_FILE, png.getvalue())
    return folder / CURVES_FILE


def _draw_loss(axes: Axes, training: Points, validation: Points) -> None:
    _style(axes, "loss")
    _draw_both(axes, training, validation, "upper right")
    values = [value for _, value in training + validation]
    if values and min(values) > 0 and max(values) / min(values) > _WIDE_RANGE:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    elif values:
        axes.set_ylim(bottom=min(0.0, *values))
    if validation:
        _name_best(axes, f"{min(value for _, value in validation):.4f}")


def _draw_accuracy(axes: Axes, training: Points, validation: Points) -> None:
    _style(axes, "accuracy")
    _draw_both(axes, training, validation, "lower right")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if training or validation:
        axes.set_ylim(*_accuracy_range(training, validation))
    if validation:
        _name_best(axes, f"{max(value for _, value in validation):.2%}")


def _draw_rate(axes: Axes, points: Points) -> None:
    _style(axes, "learning rate")
    axes.set_xlabel("epoch", color=_INK)
    axes.plot(*_columns(points), color=_RATE, linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))


def _draw_both(axes: Axes, training: Points, validation: Points, legend: Literal["upper right", "lower right"]) -> None:
    mark = "o" if len(training) == 1 else ""
    if training:
        axes.plot(*_columns(training), color=_TRAINING, linewidth=1.4, marker=mark, label="training")
    if validation:
        axes.plot(*_columns(validation), color=_VALIDATION, linewidth=1.4, marker="o", markersize=4, label="validation")
    if training or validation:
        axes.legend(loc=legend, frameon=False, labelcolor=_INK)


def _name_best(axes: Axes, text: str) -> None:
    axes.set_title(f"best validation {text}", loc="right", fontsize=10, color=_VALIDATION)


def _accuracy_range(training: Points, validation: Points) -> tuple[float, float]:
    """Return the limits of the accuracy axis; the steep first tenth of training may be cut off to show the rest."""
    low = min(value for _, value in training[len(training) // 10 :] + validation)
    top = max(value for _, value in training + validation)
    margin = 0.1 * max(top - low, 0.01)
    return max(0.0, low - margin), min(1.0, top) + margin / 4


def _style(axes: Axes, title: str) -> None:
    axes.set_ylabel(title, color=_INK)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _columns(points: Points) -> tuple[Sequence[float], Sequence[float]]:
    return [x for x, _ in points], [y for _, y in points]
