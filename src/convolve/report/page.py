"""The report as one self-contained HTML file, without scripts or external files."""

from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from convolve.label_scores import MEAN_AVERAGE_PRECISION
from convolve.report.calibration import calibrate
from convolve.report.content import RunReport
from convolve.report.figures import format_value, render_figures
from convolve.report.images import render_gallery, render_image
from convolve.report.label_section import render_labels
from convolve.report.numerics_section import render_numerics
from convolve.report.opening import NOT_EVALUATED, render_checks, render_confusions, render_opening
from convolve.report.predictions import Mistake, TestPredictions, count_confusions, score_classes
from convolve.report.svg import PlotLine, draw_lines, draw_matrix, draw_reliability, panel
from convolve.run_files import REPORT_FILE

MATRIX_CLASSES = 30
SHOWN_CLASSES = 50


def render(reports: Sequence[RunReport], written: str) -> str:
    """Return the page for one run, or for several side by side.

    It starts with what a reader wants to know first and ends with the raw figures.
    """
    title = reports[0].name if len(reports) == 1 else f"{len(reports)} runs compared"
    style = resources.files("convolve.report").joinpath("report.css").read_text(encoding="utf-8")
    accuracy, others = _curves(reports)
    body = [
        f'<div class="first">{render_opening(reports)}{accuracy}</div>'
        if len(reports) == 1
        else render_opening(reports),
        *([] if len(reports) == 1 else [accuracy]),
        *([_findings(reports[0], "h2")] if len(reports) == 1 else []),
        others,
        f'<div class="runs">{"".join(_details(report, single=len(reports) == 1) for report in reports)}</div>',
        render_figures(reports),
        *map(_setup, reports),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body><header><h1>{escape(title)}</h1><p>convolve report, {escape(written)}</p>"
        f"</header><main>{''.join(body)}</main></body></html>\n"
    )


def _findings(report: RunReport, heading: str) -> str:
    """Return the worst confusions and likely wrong labels, side by side if the page is wide enough."""
    parts = [] if report.predictions is None else [render_confusions(report.predictions, heading)]
    parts += [] if report.checks is None else [render_checks(report.checks, heading)]
    columns = "".join(f"<div>{part}</div>" for part in parts)
    return f'<section class="findings">{columns}</section>' if parts else ""


def _curves(reports: Sequence[RunReport]) -> tuple[str, str]:
    """Return the plot of the accuracy, and the other plots."""

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
    ranked = _plot("Mean average precision", lines(MEAN_AVERAGE_PRECISION)[1::2], lambda v: f"{v:.1%}")
    accuracy = ranked + _plot("Accuracy", lines("accuracy"), lambda v: f"{v:.1%}")
    others = [
        _plot("Loss", lines("loss"), lambda v: f"{v:g}", log=True),
        _plot("Learning rate", rates, lambda v: f"{v:.2g}"),
        _plot("Images per second", speeds, lambda v: f"{v:,.0f}"),
    ]
    plots = "".join(others)
    return accuracy, f'<section><h2>Curves</h2><div class="plots">{plots}</div></section>' if plots else ""


def _plot(name: str, lines: Sequence[PlotLine], format_tick: Callable[[float], str], *, log: bool = False) -> str:
    """Return a plot with its heading, or nothing if no line has two points."""
    if not any(len(line.points) > 1 for line in lines):
        return ""
    return panel(name, draw_lines(lines, f"{name.lower()} over epochs", format_tick, log=log))


def _details(report: RunReport, *, single: bool) -> str:
    parts = [f"<h2>{'Details' if single else escape(report.name)}</h2>"]
    if report.labels is not None:
        parts.append(render_labels(report.labels))
    elif report.predictions is None:
        parts.append(f'<p class="none">{NOT_EVALUATED}</p>')
    else:
        parts += [] if single else [_findings(report, "h3")]
        parts += [_confusion(report.predictions), _calibration(report.predictions), _mistakes(report.predictions)]
    if report.numerics is not None:
        parts.append(render_numerics(report.numerics))
    return f"<section>{''.join(parts)}</section>"


def _setup(report: RunReport) -> str:
    """Return the config and the environment of a run, closed."""
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name).replace("_", " "))}</th><td>{escape(format_value(value))}</td></tr>'
        for name, value in report.environment.items()
    )
    name = escape(report.name)
    return (
        f'<details><summary>Config of {name}</summary><pre tabindex="0">{escape(report.config)}</pre></details>'
        f"<details><summary>Environment of {name}</summary><table>{rows}</table></details>"
    )


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
        parts.append(f'<div class="wide" tabindex="0">{draw_matrix(matrix, names)}</div>')
    shown = sorted(scores, key=lambda score: score.f1)[:SHOWN_CLASSES] if len(scores) > SHOWN_CLASSES else scores
    note = f" (the {SHOWN_CLASSES} with the lowest F1 of {len(scores)})" if len(scores) > SHOWN_CLASSES else ""
    rows = "".join(
        f'<tr><th scope="row">{escape(s.name)}</th><td>{s.images:,}</td><td>{s.precision:.2%}</td>'
        f"<td>{s.recall:.2%}</td><td>{s.f1:.2%}</td></tr>"
        for s in shown
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("images", "precision", "recall", "F1"))
    parts.append(
        f'<h3>Classes{note}</h3><div class="wide" tabindex="0"><table><tr><td></td>{head}</tr>{rows}</table></div>'
    )
    return "".join(parts)


def _mistakes(predictions: TestPredictions) -> str:
    if not predictions.mistakes:
        return "<h3>Mistakes</h3><p>None.</p>"
    shown = [_mistake(mistake, predictions.classes) for mistake in predictions.mistakes]
    return f"<h3>Most confident mistakes</h3>{render_gallery(shown)}"


def _mistake(mistake: Mistake, classes: tuple[str, ...]) -> str:
    truth, prediction = escape(classes[mistake.truth]), escape(classes[mistake.prediction])
    caption = f"{prediction} {mistake.probability:.1%}<br>is {truth}"
    return render_image(mistake.pixels, f"test image {mistake.index}", caption)


def report_path(folder: Path) -> Path:
    """Return the path of the report of a run."""
    return folder / REPORT_FILE
