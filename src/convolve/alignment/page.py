"""Comparison of number formats as one self-contained HTML page."""

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from convolve.files import write_file

COLORS = ("#4c78a8", "#e4572e", "#5b8c5a", "#b279a2", "#d9a441", "#6b6ecf", "#3aa6a6")
KINDS = ("activation", "gradient", "update", "weight")

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.conclusion { border-left: 4px solid #4c78a8; padding: .5rem 1rem; background: #8882; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8884; }
td.number, th.number { text-align: right; } svg { background: white; max-width: 100%; height: auto; }
"""

Candidate = Mapping[str, Any]


def write_alignment(path: Path, conclusion: str, candidates: Sequence[Candidate]) -> Path:
    """Write the page."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>convolve align</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<style>{_STYLE}</style><h1>Number formats compared</h1>",
        f"<p class='conclusion'>{html.escape(conclusion)}</p>",
        _section("Accuracy", _accuracies(candidates)),
        _section("Loss", _curves(candidates)),
        _section("Layers", _layers(candidates)),
        _section("Too small or too large for the format", _survey(candidates)),
        "</html>",
    ]
    write_file(path, "\n".join(parts).encode())
    return path


def _section(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{body}" if body else ""


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if number else ''}>{html.escape(cell)}</{tag}>" for number, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{cells('th', headings)}</tr>{body}</table></div>" if rows else ""


def _accuracies(candidates: Sequence[Candidate]) -> str:
    rows = []
    for one in candidates:
        accuracy, interval, parting = one["accuracy"], one["interval_95"], one["parting"]
        rows.append(
            [
                one["name"],
                one["policy"],
                "-" if accuracy is None else f"{accuracy:.2%}",
                "-" if interval is None else f"± {100 * interval:.2f}",
                str(len(one["accuracies"])),
                str(one["skipped_steps"]),
                f"{one['lost_updates_share']:.1%}",
                "-" if parting is None else f"step {parting['step']}, {parting['kind']} of {parting['layer']}",
            ]
        )
    headings = (
        "policy", "meaning", "test accuracy", "95 % interval", "seeds", "skipped steps", "lost updates", "parts at",
    )  # fmt: skip
    return _table(headings, rows)


def _curves(candidates: Sequence[Candidate]) -> str:
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for number, one in enumerate(candidates):
        if one["curve"]:
            steps, losses = zip(*one["curve"], strict=True)
            axes.plot(steps, losses, color=COLORS[number % len(COLORS)], label=one["name"], linewidth=1.4)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_yscale("log")
    axes.grid(color="#e6e6e6")
    axes.legend(frameon=False)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))  # type: ignore[no-untyped-call]
    return text.getvalue()[text.getvalue().index("<svg") :]


def _layers(candidates: Sequence[Candidate]) -> str:
    parts = []
    for one in candidates:
        rows = [
            [entry["layer"], entry["kind"], _number(entry["cosine"], ".6f"), _number(entry["relative_error"], ".2e"),
             f"{entry['lost_share']:.1%}"]
            for kind in KINDS for entry in one["layers"] if entry["kind"] == kind
        ]  # fmt: skip
        table = _table(("layer", "tensor", "cosine", "relative error", "lost"), rows)
        if table:
            parts.append(f"<details><summary>{html.escape(one['name'])}</summary>{table}</details>")
    return "".join(parts)


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _survey(candidates: Sequence[Candidate]) -> str:
    parts = []
    for one in candidates:
        rows = [
            [place, f"{counts['underflow_share']:.2%}", f"{counts['subnormal_share']:.2%}",
             f"{counts['overflow_share']:.2%}", _bars(counts)]
            for place, counts in one["survey"].items()
        ]  # fmt: skip
        table = _table(("layer and direction", "underflow", "subnormal", "overflow", "exponents"), rows)
        if table:
            parts.append(f"<details><summary>{html.escape(one['name'])}</summary>{table}</details>")
    return "".join(parts)


def _bars(counts: Mapping[str, Any]) -> str:
    """Return a histogram in one line of text, from the first exponent to the last."""
    exponents = counts["exponents"]
    top = max(exponents, default=0)
    bars = "".join("▁▂▃▄▅▆▇█"[min(7, 8 * count // max(top, 1))] for count in exponents)
    return f"2^{counts['first_exponent']} {bars} 2^{counts['first_exponent'] + len(exponents) - 1}"
