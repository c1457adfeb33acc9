"""The report as one self-contained HTML file, without scripts or external files."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image

from convolve.loggers.files import Points
from convolve.report.calibration import calibrate
from convolve.report.numerics_section import NumericsSection, render_numerics
from convolve.report.predictions import (
    Mistake,
    Pixels,
    TestPredictions,
    count_confusions,
    score_classes,
    worst_confusions,
)
from convolve.report.svg import PlotLine, draw_lines, draw_matrix, draw_reliability, panel
from convolve.run_files import REPORT_FILE

MATRIX_CLASSES = 30
SHOWN_CLASSES = 50
SHOWN_PAIRS = 15
_IMAGE_SIDE = 96


@dataclass(frozen=True)
class RunReport:
    """Content of the report of one run; `predictions` is None if nothing was validated, `numerics` if it is empty."""

    name: str
    curves: Mapping[str, Points]
    figures: Mapping[str, Any]
    config: str
    environment: Mapping[str, Any]
    predictions: TestPredictions | None
    numerics: NumericsSection | None = None


def render(reports: Sequence[RunReport], written: str) -> str:
    """Return the page for one run, or for several side by side."""
    title = reports[0].name if len(reports) == 1 else f"{len(reports)} runs compared"
    style = resources.files("convolve.report").joinpath("report.css").read_text(encoding="utf-8")
    body = [_figures(reports), _curves(reports), f'<div class="runs">{"".join(map(_details, reports))}</div>']
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body><header><h1>{escape(title)}</h1><p>convolve report, {escape(written)}</p>"
        f"</header><main>{''.join(body)}</main></body></html>\n"
    )


def _figures(reports: Sequence[RunReport]) -> str:
    keys = list(dict.fromkeys(key for report in reports for key in report.figures))
    head = "".join(f'<th scope="col">{escape(report.name)}</th>' for report in reports)
    rows = "".join(
        f'<tr><th scope="row">{escape(key.replace("_", " "))}</th>'
        + "".join(f"<td>{_show(key, report.figures.get(key))}</td>" for report in reports)
        + "</tr>"
        for key in keys
    )
    return f'<section><h2>Figures</h2><div class="wide"><table><tr><td></td>{head}</tr>{rows}</table></div></section>'


def _show(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2%}" if key.endswith(("accuracy", "share")) else f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value))


def _curves(reports: Sequence[RunReport]) -> str:
    def lines(column: str) -> list[PlotLine]:
        curves = []
        for number, report in enumerate(reports):
            name = "" if len(reports) == 1 else f"{report.name} "
            validation = 1 if len(reports) == 1 else number
            curves.append(PlotLine(f"{name}training", report.curves.get(f"training {column}", []), number, faint=True))
            curves.append(PlotLine(f"{name}validation", report.curves.get(f"validation {column}", []), validation))
        return curves

    rates = [PlotLine(report.name, report.curves.get("rate", []), n, faint=True) for n, report in enumerate(reports)]
    speeds = [PlotLine(report.name, report.curves.get("speed", []), n, faint=True) for n, report in enumerate(reports)]
    plots = {
        "Loss": draw_lines(lines("loss"), "loss over epochs", lambda v: f"{v:g}", log=True),
        "Accuracy": draw_lines(lines("accuracy"), "accuracy over epochs", lambda v: f"{v:.1%}"),
        "Learning rate": draw_lines(rates, "learning rate over epochs", lambda v: f"{v:.2g}"),
        "Images per second": draw_lines(speeds, "images per second over epochs", lambda v: f"{v:,.0f}"),
    }
    return f'<section class="plots">{"".join(panel(name, plot) for name, plot in plots.items())}</section>'


def _details(report: RunReport) -> str:
    parts = [f"<h2>{escape(report.name)}</h2>"]
    if report.predictions is None:
        parts.append('<p class="none">No test image was evaluated for this report.</p>')
    else:
        parts += [_calibration(report.predictions), _confusion(report.predictions), _mistakes(report.predictions)]
    if report.numerics is not None:
        parts.append(render_numerics(report.numerics))
    parts.append(f"<details><summary>Config</summary><pre>{escape(report.config)}</pre></details>")
    rows = "".join(
        f'<tr><th scope="row">{escape(str(k))}</th><td>{escape(str(v))}</td></tr>'
        for k, v in report.environment.items()
    )
    parts.append(f"<details><summary>Environment</summary><table>{rows}</table></details>")
    return f"<section>{''.join(parts)}</section>"


def _calibration(predictions: TestPredictions) -> str:
    calibration = calibrate(predictions.logits, predictions.labels)
    return (
        f"<h3>Calibration</h3><p>{escape(predictions.subject)}: accuracy {predictions.accuracy:.2%} of "
        f"{len(predictions.labels):,} test images. Expected calibration error {calibration.error:.2%}, negative "
        f"log-likelihood {calibration.negative_log_likelihood:.4f}. Temperature {calibration.temperature:.3f}, fitted "
        f"on every second image, changes the error of the others from {calibration.held_out_error:.2%} to "
        f"{calibration.held_out_error_after:.2%}.</p>"
        + panel("Reliability: accuracy over confidence", draw_reliability(calibration.bins))
    )


def _confusion(predictions: TestPredictions) -> str:
    names = predictions.classes
    matrix = count_confusions(predictions.predictions, predictions.labels, len(names))
    scores = score_classes(matrix, names)
    parts = ["<h3>Confusion</h3>"]
    if len(names) <= MATRIX_CLASSES:
        parts.append(f'<div class="wide">{draw_matrix(matrix, names)}</div>')
    pairs = worst_confusions(matrix, names, SHOWN_PAIRS)
    if pairs:
        items = "".join(
            f"<li>{escape(p.truth)} predicted as {escape(p.prediction)}: {p.images:,}</li>" for p in pairs[:5]
        )
        parts.append(f"<p>Most frequent confusions:</p><ol>{items}</ol>")
    shown = sorted(scores, key=lambda score: score.f1)[:SHOWN_CLASSES] if len(scores) > SHOWN_CLASSES else scores
    note = f" (the {SHOWN_CLASSES} with the lowest F1 of {len(scores)})" if len(scores) > SHOWN_CLASSES else ""
    rows = "".join(
        f'<tr><th scope="row">{escape(s.name)}</th><td>{s.images:,}</td><td>{s.precision:.2%}</td>'
        f"<td>{s.recall:.2%}</td><td>{s.f1:.2%}</td></tr>"
        for s in shown
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("images", "precision", "recall", "F1"))
    parts.append(f'<h3>Classes{note}</h3><div class="wide"><table><tr><td></td>{head}</tr>{rows}</table></div>')
    return "".join(parts)


def _mistakes(predictions: TestPredictions) -> str:
    if not predictions.mistakes:
        return "<h3>Mistakes</h3><p>None.</p>"
    shown = "".join(_mistake(mistake, predictions.classes) for mistake in predictions.mistakes)
    return f'<h3>Most confident mistakes</h3><div class="gallery">{shown}</div>'


def _mistake(mistake: Mistake, classes: tuple[str, ...]) -> str:
    truth, prediction = escape(classes[mistake.truth]), escape(classes[mistake.prediction])
    return (
        f'<figure><img alt="test image {mistake.index}" src="{image_data_url(mistake.pixels)}">'
        f"<figcaption>{prediction} {mistake.probability:.1%}<br>is {truth}</figcaption></figure>"
    )


def image_data_url(pixels: Pixels) -> str:
    """Return an image [H, W, C] as a data URL, reduced to a thumbnail."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    image.thumbnail((_IMAGE_SIDE, _IMAGE_SIDE))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def report_path(folder: Path) -> Path:
    """Return the path of the report of a run."""
    return folder / REPORT_FILE
