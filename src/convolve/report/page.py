"""Reports as one self-contained HTML file: nothing is fetched, nothing runs; it can be mailed and kept."""

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
from convolve.report.confusion import count_confusions, score_classes, worst_confusions
from convolve.report.numerics_section import NumericsSection, render_numerics
from convolve.report.predictions import Mistake, Pixels, TestPredictions
from convolve.report.svg import PlotLine, draw_lines, draw_matrix, draw_reliability, panel
from convolve.run_files import REPORT_FILE

MATRIX_CLASSES = 30
SHOWN_CLASSES = 50
SHOWN_PAIRS = 15
_IMAGE_SIDE = 96


@dataclass(frozen=True)
class RunReport:
    """All that a report tells about one run; `evidence` is None where nothing was validated, `numbers` where nothing
    about number formats is worth telling."""

    name: str
    curves: Mapping[str, Points]
    figures: Mapping[str, Any]
    config: str
    environment: Mapping[str, Any]
    evidence: TestPredictions | None
    numbers: NumericsSection | None = None


def render(stories: Sequence[RunReport], written: str) -> str:
    """The page for one run, or for several side by side."""
    title = stories[0].name if len(stories) == 1 else f"{len(stories)} runs compared"
    style = resources.files("convolve.report").joinpath("report.css").read_text(encoding="utf-8")
    body = [_figures(stories), _curves(stories), f'<div class="runs">{"".join(_details(one) for one in stories)}</div>']
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body><header><h1>{escape(title)}</h1><p>convolve report, {escape(written)}</p>"
        f"</header><main>{''.join(body)}</main></body></html>\n"
    )


def _figures(stories: Sequence[RunReport]) -> str:
    keys = list(dict.fromkeys(key for one in stories for key in one.figures))
    head = "".join(f'<th scope="col">{escape(one.name)}</th>' for one in stories)
    rows = "".join(
        f'<tr><th scope="row">{escape(key.replace("_", " "))}</th>'
        + "".join(f"<td>{_show(key, one.figures.get(key))}</td>" for one in stories)
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


def _curves(stories: Sequence[RunReport]) -> str:
    def lines(column: str) -> list[PlotLine]:
        found = []
        for number, one in enumerate(stories):
            name = "" if len(stories) == 1 else f"{one.name} "
            validation = 1 if len(stories) == 1 else number
            found.append(PlotLine(f"{name}training", one.curves.get(f"training {column}", []), number, faint=True))
            found.append(PlotLine(f"{name}validation", one.curves.get(f"validation {column}", []), validation))
        return found

    rates = [PlotLine(one.name, one.curves.get("rate", []), n, faint=True) for n, one in enumerate(stories)]
    speeds = [PlotLine(one.name, one.curves.get("speed", []), n, faint=True) for n, one in enumerate(stories)]
    plots = {
        "Loss": draw_lines(lines("loss"), "loss over epochs", lambda v: f"{v:g}", log=True),
        "Accuracy": draw_lines(lines("accuracy"), "accuracy over epochs", lambda v: f"{v:.1%}"),
        "Learning rate": draw_lines(rates, "learning rate over epochs", lambda v: f"{v:.2g}"),
        "Images per second": draw_lines(speeds, "images per second over epochs", lambda v: f"{v:,.0f}"),
    }
    return f'<section class="plots">{"".join(panel(name, plot) for name, plot in plots.items())}</section>'


def _details(story: RunReport) -> str:
    parts = [f"<h2>{escape(story.name)}</h2>"]
    if story.evidence is None:
        parts.append('<p class="none">No test image was evaluated for this report.</p>')
    else:
        parts += [_calibration(story.evidence), _confusion(story.evidence), _mistakes(story.evidence)]
    if story.numbers is not None:
        parts.append(render_numerics(story.numbers))
    parts.append(f"<details><summary>Config</summary><pre>{escape(story.config)}</pre></details>")
    rows = "".join(
        f'<tr><th scope="row">{escape(str(k))}</th><td>{escape(str(v))}</td></tr>' for k, v in story.environment.items()
    )
    parts.append(f"<details><summary>Environment</summary><table>{rows}</table></details>")
    return f"<section>{''.join(parts)}</section>"


def _calibration(evidence: TestPredictions) -> str:
    found = calibrate(evidence.logits, evidence.labels)
    return (
        f"<h3>Calibration</h3><p>{escape(evidence.what)}: accuracy {evidence.accuracy:.2%} of {len(evidence.labels):,}"
        f" test images. Expected calibration error {found.error:.2%}, negative log-likelihood "
        f"{found.negative_log_likelihood:.4f}. Temperature {found.temperature:.3f}, fitted on every second image, "
        f"takes the error of the others from {found.held_out_error:.2%} to {found.held_out_error_after:.2%}.</p>"
        + panel("Reliability: accuracy over confidence", draw_reliability(found.bins))
    )


def _confusion(evidence: TestPredictions) -> str:
    names = evidence.classes
    matrix = count_confusions(evidence.answers, evidence.labels, len(names))
    scores = score_classes(matrix, names)
    parts = ["<h3>Confusion</h3>"]
    if len(names) <= MATRIX_CLASSES:
        parts.append(f'<div class="wide">{draw_matrix(matrix, names)}</div>')
    pairs = worst_confusions(matrix, names, SHOWN_PAIRS)
    if pairs:
        items = "".join(f"<li>{escape(p.truth)} taken for {escape(p.answer)}: {p.images:,}</li>" for p in pairs[:5])
        parts.append(f"<p>Mixed up most often:</p><ol>{items}</ol>")
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


def _mistakes(evidence: TestPredictions) -> str:
    if not evidence.mistakes:
        return "<h3>Mistakes</h3><p>None.</p>"
    shown = "".join(_mistake(one, evidence.classes) for one in evidence.mistakes)
    return f'<h3>Most confident mistakes</h3><div class="gallery">{shown}</div>'


def _mistake(one: Mistake, classes: tuple[str, ...]) -> str:
    truth, answer = escape(classes[one.truth]), escape(classes[one.answer])
    return (
        f'<figure><img alt="test image {one.index}" src="{image_data_url(one.pixels)}">'
        f"<figcaption>{answer} {one.probability:.1%}<br>is {truth}</figcaption></figure>"
    )


def image_data_url(pixels: Pixels) -> str:
    """A picture [H, W, C] as an address that holds the picture itself."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    image.thumbnail((_IMAGE_SIDE, _IMAGE_SIDE))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def report_path(folder: Path) -> Path:
    """Where the report of one run stands."""
    return folder / REPORT_FILE
