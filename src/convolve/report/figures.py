"""Figures of a run in words and units that people read: `13,824 images/s`, not `1.382e+04`."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from convolve.report.content import RunReport

NOTHING = "-"
_UNCHANGING = frozenset({"run-dir", "name"})


def format_number(value: float) -> str:
    """Return a number with thousands separators and about four significant digits, without an exponent."""
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1e-4 or not value:
        return f"{value:.4g}"
    return f"{value:.12f}".rstrip("0").rstrip(".") if abs(value) >= 1e-9 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Return a duration such as 12.8 s, 3 min 20 s or 2 h 5 min."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours:,} h {left} min" if hours else f"{minutes} min {rest} s"


def format_value(value: Any) -> str:
    """Return any value of a summary or config as text, never as Python code."""
    if value is None or value == [] or value == {}:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return format_number(value)
    if isinstance(value, Mapping):
        shown = ((key, item) for key, item in value.items() if item not in (None, [], {}, False))
        return "; ".join(f"{str(key).replace('_', ' ')} {format_value(item)}" for key, item in shown)
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value)
    return str(value)


def _percent(value: Any) -> str:
    return f"{value:.2%}" if isinstance(value, int | float) else format_value(value)


def _seconds(value: Any) -> str:
    return format_duration(value) if isinstance(value, int | float) else format_value(value)


def _speed(unit: str, digits: int) -> Callable[[Any], str]:
    """Return a format; a run without a step measured no speed."""

    def show(value: Any) -> str:
        if not isinstance(value, int | float):
            return format_value(value)
        return f"{value:,.{digits}f} {unit}" if value else NOTHING

    return show


def _numerics(value: Any) -> str:
    if not isinstance(value, Mapping):
        return format_value(value)
    words = (value.get("policy"), value.get("execution"), value.get("reason"))
    return ", ".join(format_value(word) for word in words if word) or NOTHING


def _weights(value: Any) -> str:
    if not isinstance(value, Mapping):
        return format_value(value)
    license_name = value.get("license")
    words = (value.get("name"), value.get("source"), license_name and f"license {license_name}")
    return ", ".join(format_value(word) for word in words if word) or NOTHING


_FORMATS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "network": ("model", format_value),
    "case_name": ("case", format_value),
    "images_per_second": ("training speed", _speed("images/s", 0)),
    "ms_per_step": ("time per step", _speed("ms", 1)),
    "first_excluded": ("speed without the first log interval", format_value),
    "data_wait_included": ("speed with waiting for data", format_value),
    "test_accuracy": ("test accuracy", _percent),
    "test_samples": ("test images", format_value),
    "end_to_end_seconds": ("total time", _seconds),
    "numerics": ("number formats", _numerics),
    "weights": ("initial weights", _weights),
    "data_wait_share": ("time spent waiting for data", _percent),
}


def format_figure(key: str, value: Any) -> tuple[str, str]:
    """Return the name of a figure of summary.json and its value, for people."""
    name, show = _FORMATS.get(key, (key.replace("_", " "), format_value))
    return name, show(value)


def render_figures(reports: Sequence[RunReport]) -> str:
    """Return the table of all figures, one column for each run."""
    keys = list(dict.fromkeys(key for report in reports for key in report.figures))
    rows = []
    for key in keys:
        cells = [format_figure(key, report.figures.get(key)) for report in reports]
        rows.append((cells[0][0], [value for _, value in cells]))
    return f"<section><h2>Figures</h2>{render_table(reports, rows)}</section>"


def render_differences(reports: Sequence[RunReport]) -> str:
    """Return the options of which the runs have different values."""
    keys = list(dict.fromkeys(key for report in reports for key in report.options if key not in _UNCHANGING))
    rows = []
    for key in keys:
        values = [report.options.get(key) for report in reports]
        if any(value != values[0] for value in values):
            rows.append((f"--{key}", [format_value(value) for value in values]))
    body = render_table(reports, rows) if rows else "<p>None.</p>"
    return f"<section><h2>Options that differ</h2>{body}</section>"


def render_table(reports: Sequence[RunReport], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a table with a row for each name and a column for each run."""
    head = "".join(f'<th scope="col">{escape(report.name)}</th>' for report in reports)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(value)}</td>" for value in values)}</tr>'
        for name, values in rows
    )
    return f'<div class="wide" tabindex="0"><table><tr><td></td>{head}</tr>{body}</table></div>'
