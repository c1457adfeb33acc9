"""A pipeline timetable as a picture: a row for each stage, time to the right, blue forward and orange backward."""

from xml.sax.saxutils import escape

from convolve.parallel.timetable import Box, Pass, Timetable

_LEFT, _TOP, _ROW, _BAR, _FOOT = 74, 64, 34, 26, 50
_WIDTH = 960
# A number inside a narrower box could not be read.
_LEAST_LABEL = 16.0

_STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #57606a }
  .title { font-size: 16px; font-weight: 600; fill: #1f2328 }
  .number { font-size: 11px; fill: #ffffff; text-anchor: middle }
  .right { text-anchor: end }
  .page { fill: #ffffff }
  .idle { fill: #eef0f3 }
  .forward { fill: #2f7ad6; stroke: #ffffff; stroke-width: 0.5 }
  .backward { fill: #d9762b; stroke: #ffffff; stroke-width: 0.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #a3adb8 }
    .title { fill: #f0f3f6 }
    .page { fill: #0d1117 }
    .idle { fill: #1c222b }
    .forward, .backward { stroke: #0d1117 }
  }
"""


def draw_timetable(timetable: Timetable, title: str) -> str:
    """The timetable as an SVG that needs no other program and follows light and dark."""
    height = _TOP + _ROW * timetable.stages + _FOOT
    scale = (_WIDTH - _LEFT - 20) / timetable.seconds
    below = _TOP + _ROW * timetable.stages
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
        ' role="img" aria-label="pipeline timetable">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="20" y="28">{escape(title)}</text>',
        f'<text x="20" y="48">{timetable.stages} stages, {timetable.micro_batches} micro batches, '
        f"bubble {timetable.bubble:.1%}</text>",
        *(_draw_row(stage, timetable.seconds * scale) for stage in range(timetable.stages)),
        *(_draw_box(box, scale) for box in timetable.boxes),
        f'<text x="{_LEFT}" y="{below + 14}">0</text>',
        f'<text class="right" x="{_WIDTH - 20}" y="{below + 14}">{1000 * timetable.seconds:,.1f} ms</text>',
        *_draw_key(below + 24),
    ]
    return "\n".join([*lines, "</svg>", ""])


def _draw_row(stage: int, width: float) -> str:
    top = _TOP + _ROW * stage
    return (
        f'<text x="20" y="{top + 18}">stage {stage}</text>'
        f'<rect class="idle" x="{_LEFT}" y="{top}" width="{width:.2f}" height="{_BAR}"/>'
    )


def _draw_box(box: Box, scale: float) -> str:
    left, width = _LEFT + box.begin * scale, (box.end - box.begin) * scale
    top = _TOP + _ROW * box.stage
    told = f"stage {box.stage}, micro batch {box.micro_batch}, {box.direction.value}"
    moments = f"{1000 * box.begin:.2f} to {1000 * box.end:.2f} ms"
    label = f'<text class="number" x="{left + width / 2:.2f}" y="{top + 17}">{box.micro_batch}</text>'
    return (
        f'<rect class="{box.direction.value}" x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}">'
        f"<title>{told}, {moments}</title></rect>" + (label if width >= _LEAST_LABEL else "")
    )


def _draw_key(top: int) -> list[str]:
    return [
        f'<rect class="{direction.value}" x="{_LEFT + 110 * index}" y="{top}" width="14" height="14"/>'
        f'<text x="{_LEFT + 20 + 110 * index}" y="{top + 11}">{direction.value}</text>'
        for index, direction in enumerate(Pass)
    ]
