"""Number formats of a run in its report: loss scale, skipped steps, and exponents of each layer.

Read from the events in events.jsonl: `numerics` (the choice), `loss_scale`, `skipped_step`, and `survey`, which counts
the exponents of all values that a layer computes in each direction, before rounding.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from convolve.errors import ConvolveError
from convolve.files import open_run_file
from convolve.report.svg import PlotLine, draw_lines, panel

Layers = Mapping[str, Mapping[str, Any]]
FULL_PRECISION = "fp32"
KINDS = ("numerics", "loss_scale", "skipped_step", "survey", "train", "restored")
STRIP_HEIGHT, CELL = 22, 6
SUSPICIOUS_FRACTION = 0.01


@dataclass(frozen=True)
class SurveySection:
    """One survey; `limits` are the exponents of the smallest number, the smallest normal one and the largest."""

    step: int
    format: str
    limits: tuple[int, int, int]
    layers: Layers

    def worst(self, key: str) -> float:
        """Return the largest fraction of any layer."""
        return max((float(counts[key]) for counts in self.layers.values()), default=0.0)


@dataclass
class NumericsSection:
    """Numerics events of a run in order of steps."""

    chosen: dict[str, Any] = field(default_factory=dict)
    scales: list[tuple[int, float]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    surveys: list[SurveySection] = field(default_factory=list)
    steps: int = 0

    @property
    def has_content(self) -> bool:
        """False for fp32 without surveys and skipped steps."""
        return bool(self.surveys or self.skipped or self.chosen.get("compute", FULL_PRECISION) != FULL_PRECISION)

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one event; a restore removes the events after its step."""
        kind, step = event["kind"], int(event.get("step", 0))
        if kind == "numerics":
            self.chosen = dict(event)
        elif kind == "loss_scale":
            self.scales.append((step, float(event["loss_scale"])))
        elif kind == "skipped_step":
            self.skipped.append(step)
        elif kind == "survey" and "limits" in event:
            low, normal, high = event["limits"]
            self.surveys.append(SurveySection(step, str(event["format"]), (low, normal, high), event["layers"]))
        elif kind == "restored":
            self._remove_after(step)
        self.steps = step if kind == "restored" else max(self.steps, step)

    def _remove_after(self, step: int) -> None:
        self.scales = [point for point in self.scales if point[0] <= step]
        self.skipped = [skipped for skipped in self.skipped if skipped <= step]
        self.surveys = [survey for survey in self.surveys if survey.step < step]


def read_numerics(path: Path) -> NumericsSection | None:
    """Read events.jsonl; return None if there is no content. Incomplete lines are skipped."""
    section = NumericsSection()
    try:
        with open_run_file(path) as file:
            for line in file:
                event = _parse(line)
                if isinstance(kind := event.get("kind"), str) and kind in KINDS:
                    section.add(event)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConvolveError(f"{path}: cannot read ({error.strerror}); move the file away") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConvolveError(f"{path}: not an event of a run ({error}); move the file away") from error
    return section if section.has_content else None


def _parse(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def render_numerics(section: NumericsSection) -> str:
    """Return the section as HTML."""
    parts = [f"<h3>Numbers</h3><p>{_describe_choice(section)}</p>"]
    plots = panel("Loss scale over steps", _draw_scale(section)) if section.scales or section.skipped else ""
    if len(section.surveys) > 1:
        plots += panel("Fractions of values in the worst layer, over steps", _draw_fractions(section.surveys))
    parts.append(f'<div class="plots">{plots}</div>' if plots else "")
    if not section.surveys:
        return "".join(parts) + '<p class="none">No exponent survey; enable it with --survey-freq N.</p>'
    last, worst = section.surveys[-1], max(section.surveys, key=lambda survey: survey.worst("overflow_share"))
    parts.append(_show_survey(last))
    if worst is not last and worst.worst("overflow_share") > 0:
        parts.append(f"<details><summary>Survey with the most overflows</summary>{_show_survey(worst)}</details>")
    return "".join(parts)


def _describe_choice(section: NumericsSection) -> str:
    chosen = section.chosen
    text = f"{chosen.get('policy', 'fp32')}, {chosen.get('execution', 'native')}"
    if chosen.get("reason"):
        text += f" ({chosen['reason']})"
    scale = section.scales[-1][1] if section.scales else chosen.get("first_loss_scale")
    if scale is not None:
        text += f". Loss scale {_power(float(scale))} at the end"
    skips = len(section.skipped)
    return escape(f"{text}; {skips} of {section.steps:,} steps skipped because gradients were not finite.")


def _power(value: float) -> str:
    exponent = math.log2(value) if value > 0 else 0.5
    return f"2^{exponent:.0f}" if value >= 1024 and exponent == round(exponent) else f"{value:g}"


def _draw_scale(section: NumericsSection) -> str:
    """Plot the logarithm of the scale as a staircase: it changes in steps, by powers of two."""
    known = [(0, float(section.chosen.get("first_loss_scale") or 1)), *section.scales]
    stairs: list[tuple[float, float]] = []
    for (step, scale), (following, _) in zip(known, [*known[1:], (section.steps, 0)], strict=True):
        stairs += [(step, math.log2(scale)), (following, math.log2(scale))]
    marks = PlotLine("skipped step", [(step, 0.0) for step in section.skipped], 1)
    line = PlotLine("loss scale", stairs, 0, faint=True)
    return draw_lines([line], "loss scale over steps", lambda value: f"2^{value:g}", across="step", marks=marks)


def _draw_fractions(surveys: Sequence[SurveySection]) -> str:
    kinds = ("overflow", "underflow", "subnormal")
    lines = [
        PlotLine(kind, [(survey.step, survey.worst(f"{kind}_share")) for survey in surveys], color)
        for kind, color in zip(kinds, (1, 0, 4), strict=True)
    ]
    return draw_lines(lines, "fractions of values over steps", lambda value: f"{value:.1%}", across="step")


def _show_survey(survey: SurveySection) -> str:
    """Return a table of layers with their histograms, all on one scale of exponents."""
    low, high = _span(survey)
    rows = "".join(
        f'<tr><th scope="row">{escape(layer)}</th><td>{_strip(counts, survey.limits, low, high)}</td>'
        + "".join(_fraction(float(counts[f"{kind}_share"]), kind) for kind in ("underflow", "subnormal", "overflow"))
        + "</tr>"
        for layer, counts in survey.layers.items()
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "exponents", "underflow", "subnormal", "overflow"))
    small, normal, large = survey.limits
    return (
        f"<h4>Exponents at step {survey.step:,}</h4><p>From 2^{low} to 2^{high}; heights are logarithmic. "
        f"Shaded: outside the range of {escape(survey.format)}, below 2^{small} (lost) and above 2^{large} (overflow). "
        f"Light: below 2^{normal}, stored with fewer bits. Fractions are of nonzero values.</p>"
        f'<div class="wide"><table class="exponents"><tr>{head}</tr>{rows}</table></div>'
    )


def _span(survey: SurveySection) -> tuple[int, int]:
    firsts = [int(counts["first_exponent"]) for counts in survey.layers.values() if counts["exponents"]]
    lasts = [
        int(counts["first_exponent"]) + len(counts["exponents"]) - 1
        for counts in survey.layers.values()
        if counts["exponents"]
    ]
    return min([*firsts, survey.limits[0] - 2]), max([*lasts, survey.limits[2] + 2])


def _fraction(value: float, kind: str) -> str:
    bad = value > (0 if kind == "overflow" else SUSPICIOUS_FRACTION)
    return f"<td{' class=bad' if bad else ''}>{value:.2%}</td>"


def _strip(counts: Mapping[str, Any], limits: tuple[int, int, int], low: int, high: int) -> str:
    """Draw a histogram over the zones of its format."""
    small, normal, large = (CELL * (limit - low) for limit in limits)
    width = CELL * (high - low + 1)
    zones = (("lost", 0, small), ("weak", small, normal), ("lost", large + CELL, width))
    body = "".join(
        f'<rect class="{kind}" x="{left}" width="{right - left}" height="{STRIP_HEIGHT}"/>'
        for kind, left, right in zones
    )
    exponents = counts["exponents"]
    top = math.log1p(max(exponents, default=0)) or 1.0
    path = f"M{CELL * (int(counts['first_exponent']) - low)},{STRIP_HEIGHT}"
    for count in exponents:
        path += f"V{STRIP_HEIGHT * (1 - math.log1p(count) / top):.1f}h{CELL}"
    label = f"exponents from 2^{counts['first_exponent']} on"
    return (
        f'<svg viewBox="0 0 {width} {STRIP_HEIGHT}" role="img" aria-label="{label}">{body}'
        f'<path class="bar" d="{path}V{STRIP_HEIGHT}z"/></svg>'
    )
