"""What a run did with its number formats: the loss scale, skipped steps, and the exponents of each layer.

It is read from events.jsonl: `numerics` (what was chosen), `loss_scale` and `skipped_step`, and `survey`, which counts
the exponents of everything that a layer computes in each direction, before it is rounded.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

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

    def worst(self, share: str) -> float:
        """The largest share of any layer."""
        return max((float(counts[share]) for counts in self.layers.values()), default=0.0)


@dataclass
class NumericsSection:
    """What is known about the numbers of a run, in the order of steps."""

    chosen: dict[str, Any] = field(default_factory=dict)
    scales: list[tuple[int, float]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    surveys: list[SurveySection] = field(default_factory=list)
    steps: int = 0

    @property
    def worth_telling(self) -> bool:
        """Whether it is more than fp32 with nothing to see."""
        return bool(self.surveys or self.skipped or self.chosen.get("compute", FULL_PRECISION) != FULL_PRECISION)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one event of a run; a restore takes back what came after its step."""
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
            self._take_back(step)
        self.steps = step if kind == "restored" else max(self.steps, step)

    def _take_back(self, step: int) -> None:
        self.scales = [point for point in self.scales if point[0] <= step]
        self.skipped = [one for one in self.skipped if one <= step]
        self.surveys = [one for one in self.surveys if one.step < step]


def read_numerics(path: Path) -> NumericsSection | None:
    """The story in events.jsonl; None where there is nothing to tell. A line that is cut off is left out."""
    story = NumericsSection()
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                event = _parse(line)
                if event.get("kind") in KINDS:
                    story.take(event)
    except FileNotFoundError:
        return None
    return story if story.worth_telling else None


def _parse(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def render_numerics(story: NumericsSection) -> str:
    """The section of a report."""
    parts = [f"<h3>Numbers</h3><p>{_describe_choice(story)}</p>"]
    plots = panel("Loss scale over steps", _draw_scale(story)) if story.scales or story.skipped else ""
    if len(story.surveys) > 1:
        plots += panel("Shares of values in the worst layer, over steps", _draw_fractions(story.surveys))
    parts.append(f'<div class="plots">{plots}</div>' if plots else "")
    if not story.surveys:
        return "".join(parts) + '<p class="none">No survey of exponents was made; --survey-freq N makes them.</p>'
    last, worst = story.surveys[-1], max(story.surveys, key=lambda one: one.worst("overflow_share"))
    parts.append(_show_survey(last))
    if worst is not last and worst.worst("overflow_share") > 0:
        parts.append(f"<details><summary>Where most values overflowed</summary>{_show_survey(worst)}</details>")
    return "".join(parts)


def _describe_choice(story: NumericsSection) -> str:
    chosen = story.chosen
    text = f"{chosen.get('policy', 'fp32')}, {chosen.get('execution', 'native')}"
    if chosen.get("reason"):
        text += f" ({chosen['reason']})"
    scale = story.scales[-1][1] if story.scales else chosen.get("first_loss_scale")
    if scale is not None:
        text += f". Loss scale {_power(float(scale))} at the end"
    skips = len(story.skipped)
    return escape(f"{text}; {skips} of {story.steps:,} steps skipped because gradients were not finite.")


def _power(value: float) -> str:
    exponent = math.log2(value) if value > 0 else 0.5
    return f"2^{exponent:.0f}" if value >= 1024 and exponent == round(exponent) else f"{value:g}"


def _draw_scale(story: NumericsSection) -> str:
    """A staircase, since the scale holds until it changes; its logarithm, since it goes by powers of two."""
    known = [(0, float(story.chosen.get("first_loss_scale") or 1)), *story.scales]
    stairs: list[tuple[float, float]] = []
    for (step, scale), (following, _) in zip(known, [*known[1:], (story.steps, 0)], strict=True):
        stairs += [(step, math.log2(scale)), (following, math.log2(scale))]
    marks = PlotLine("skipped step", [(step, 0.0) for step in story.skipped], 1)
    line = PlotLine("loss scale", stairs, 0, faint=True)
    return draw_lines([line], "loss scale over steps", lambda value: f"2^{value:g}", across="step", marks=marks)


def _draw_fractions(surveys: Sequence[SurveySection]) -> str:
    kinds = ("overflow", "underflow", "subnormal")
    lines = [
        PlotLine(kind, [(one.step, one.worst(f"{kind}_share")) for one in surveys], color)
        for kind, color in zip(kinds, (1, 0, 4), strict=True)
    ]
    return draw_lines(lines, "shares of values over steps", lambda value: f"{value:.1%}", across="step")


def _show_survey(survey: SurveySection) -> str:
    """A table of layers, each with its histogram; all of them share one scale of exponents."""
    low, high = _span(survey)
    rows = "".join(
        f'<tr><th scope="row">{escape(place)}</th><td>{_strip(counts, survey.limits, low, high)}</td>'
        + "".join(_fraction(float(counts[f"{kind}_share"]), kind) for kind in ("underflow", "subnormal", "overflow"))
        + "</tr>"
        for place, counts in survey.layers.items()
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "exponents", "underflow", "subnormal", "overflow"))
    small, normal, large = survey.limits
    return (
        f"<h4>Exponents at step {survey.step:,}</h4><p>From 2^{low} to 2^{high}; heights are logarithmic. "
        f"Shaded is what {escape(survey.format)} cannot hold: below 2^{small} (lost) and above 2^{large} (overflow); "
        f"light, down from 2^{normal}, what it holds with fewer bits. Shares are of values that are not zero.</p>"
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
    """A histogram over the zones of its format."""
    small, normal, large = (CELL * (limit - low) for limit in limits)
    width = CELL * (high - low + 1)
    zones = (("lost", 0, small), ("weak", small, normal), ("lost", large + CELL, width))
    body = "".join(
        f'<rect class="{kind}" x="{left}" width="{right - left}" height="{STRIP_HEIGHT}"/>'
        for kind, left, right in zones
    )
    found = counts["exponents"]
    top = math.log1p(max(found, default=0)) or 1.0
    path = f"M{CELL * (int(counts['first_exponent']) - low)},{STRIP_HEIGHT}"
    for count in found:
        path += f"V{STRIP_HEIGHT * (1 - math.log1p(count) / top):.1f}h{CELL}"
    label = f"exponents from 2^{counts['first_exponent']} on"
    return (
        f'<svg viewBox="0 0 {width} {STRIP_HEIGHT}" role="img" aria-label="{label}">{body}'
        f'<path class="bar" d="{path}V{STRIP_HEIGHT}z"/></svg>'
    )
