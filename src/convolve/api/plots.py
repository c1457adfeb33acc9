"""Curves of a run as SVG, for notebooks and files."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from convolve.errors import ConfigError, suggest
from convolve.files import write_file
from convolve.loggers.base import TrainRecord, ValidationRecord

_STYLE = (
    "<style>.convolve-plot{max-width:560px;font:13px system-ui,sans-serif}.convolve-plot figure{margin:0 0 8px}"
    ".convolve-plot .tick{fill:#76818d;font-size:11px}.convolve-plot .grid{stroke:#8884}"
    ".convolve-plot .line{fill:none;stroke:var(--c);stroke-width:2}.convolve-plot .line.faint{stroke-width:1.3}"
    ".convolve-plot .dot{fill:var(--c)}.convolve-plot .c0{--c:#4c78a8}.convolve-plot .c1{--c:#e4572e}"
    ".convolve-plot .c2{--c:#4f9d69}.convolve-plot .c3{--c:#a05fb0}.convolve-plot .c4{--c:#c99a1e}"
    ".convolve-plot .c5{--c:#3aa6b9}.convolve-plot .legend{display:flex;gap:16px;margin:2px 0;color:#76818d}"
    ".convolve-plot .swatch{display:inline-block;width:16px;height:3px;background:var(--c);margin-right:6px}</style>"
)
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    """One panel per column, each with named curves of (x, y) points. A notebook shows it; `save` writes a file."""

    panels: tuple[tuple[str, tuple[tuple[str, Points], ...]], ...]
    across: str = "epoch"

    def _repr_html_(self) -> str:
        return f'<div class="convolve-plot">{_STYLE}{"".join(self._draw(name) for name, _ in self.panels)}</div>'

    def _draw(self, name: str) -> str:
        from convolve.report.svg import PlotLine, draw_lines, panel

        lines = [
            PlotLine(label, points, color) for color, (label, points) in enumerate(dict(self.panels)[name]) if points
        ]
        return panel(name, draw_lines(lines, name, "{:.4g}".format, across=self.across))

    def save(self, path: str | Path) -> Path:
        """Write the plot as an SVG or HTML file."""
        target = check_plot_file(path)
        text = self._repr_html_() if target.suffix == ".html" else self._to_svg()
        write_file(target, text.encode(), ConfigError)
        return target

    def _to_svg(self) -> str:
        """Return the panels below each other, each with its heading and its legend."""
        from convolve.report.svg import COLORS, HEIGHT, LEFT, WIDTH

        parts, height = [_STYLE.replace(".convolve-plot ", "")], 0
        for name, curves in self.panels:
            drawn = self._draw(name)
            start, end = drawn.find("<svg "), drawn.find("</svg>")
            if start < 0:
                raise ConfigError(f"plot {name}: no data; train first")
            parts.append(f'<text class="tick" x="{LEFT}" y="{height + 14}">{escape(name)}</text>')
            parts.append(f'<svg y="{height + 18}" width="{WIDTH}" height="{HEIGHT}" {drawn[start + 5 : end]}</svg>')
            height += HEIGHT + 22
            for color, (label, _) in enumerate(curves):
                height += 16
                parts.append(f'<path class="line c{color % COLORS}" d="M{LEFT},{height - 4}h16"/>')
                parts.append(f'<text class="tick" x="{LEFT + 22}" y="{height}">{escape(label)}</text>')
            height += 16
        size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        font = 'font-family="system-ui, sans-serif"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{"".join(parts)}</svg>'


def check_plot_file(path: str | Path) -> Path:
    """Return the path of a plot, or raise if its ending is not supported."""
    target = Path(path)
    if target.suffix not in (".svg", ".html"):
        raise ConfigError(f"{target}: a plot is saved as .svg or .html; change the ending")
    return target


def plot_run(
    name: str, training: Sequence[TrainRecord], validations: Sequence[ValidationRecord], columns: Sequence[str]
) -> Plot:
    """Return the curves of some columns of both tables."""
    panels = []
    for column in columns:
        curves = tuple(
            (label, points)
            for label, records in (("training", training), ("validation", validations))
            if (points := _points(records, column))
        )
        if not curves and training:
            known = [*vars(training[0]), *training[0].metrics]
            known = [key for key in known if key not in ("metrics", "step", "epoch")]
            raise ConfigError(f"plot {column}: {name} has no such column; {suggest(column, known)}")
        panels.append((column, curves))
    return Plot(tuple(panels))


def _points(records: Sequence[Any], column: str) -> Points:
    found = [(record.epoch, {**vars(record), **record.metrics}.get(column)) for record in records]
    return [(epoch, value) for epoch, value in found if isinstance(value, int | float)]
