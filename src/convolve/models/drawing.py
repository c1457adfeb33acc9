"""A network as a picture, from top to bottom; an SVG that needs no other program and follows light and dark."""

from xml.sax.saxutils import escape

from convolve.models.anatomy import Description, name_size

_WIDTH = 440
_MARGIN = 20
_HEAD = 64
_BOX = 46
_GAP = 20

_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #57606a }
  .title { font-size: 17px; font-weight: 600; fill: #1f2328 }
  .name { font-weight: 600; fill: #1f2328 }
  .right { text-anchor: end }
  .page { fill: #ffffff }
  .plain { fill: #f3f4f6; stroke: #c9ced6 }
  .weighted { fill: #dcebfd; stroke: #6aa5e8 }
  .arrow { stroke: #6e7781; fill: none }
  .tip { fill: #6e7781 }
  @media (prefers-color-scheme: dark) {
    text { fill: #a3adb8 }
    .title, .name { fill: #f0f3f6 }
    .page { fill: #0d1117 }
    .plain { fill: #1c222b; stroke: #444c56 }
    .weighted { fill: #13294a; stroke: #3d74b8 }
    .arrow { stroke: #8b949e }
    .tip { fill: #8b949e }
  }
"""


def draw_svg(description: Description) -> str:
    """The network from top to bottom, as a picture that needs no other program; blocks with weights stand out."""
    height = _HEAD + (_BOX + _GAP) * (description.blocks + 1) - _GAP + _MARGIN
    network = escape(description.name)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
        f' role="img" aria-label="network {escape(description.name, {chr(34): "&quot;"})}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_MARGIN}" y="30">{network}</text>',
        f'<text x="{_MARGIN}" y="50">{description.parameters:,} parameters, '
        f"{description.multiply_adds:,} multiply-adds per image</text>",
        *_draw_box(_HEAD, ("input", name_size(description.input_shape), "", ""), "plain"),
    ]
    for number, row in enumerate(description.rows, start=1):
        top = _HEAD + number * (_BOX + _GAP)
        parameters = f"{row.parameters:,} parameters" if row.parameters else ""
        lines += _draw_arrow(top)
        words = (row.name, name_size(row.shape), row.kind, parameters)
        lines += _draw_box(top, words, "weighted" if row.parameters else "plain")
    return "\n".join([*lines, "</svg>", ""])


def _draw_box(top: int, words: tuple[str, str, str, str], style: str) -> list[str]:
    name, shape, kind, parameters = map(escape, words)
    left, right = _MARGIN + 12, _WIDTH - _MARGIN - 12
    upper, lower = (top + 19, top + 37) if kind else (top + 28, top + 28)
    return [
        f'<rect class="{style}" x="{_MARGIN}" y="{top}" width="{_WIDTH - 2 * _MARGIN}" height="{_BOX}" rx="6"/>',
        f'<text class="name" x="{left}" y="{upper}">{name}</text>',
        f'<text class="right" x="{right}" y="{upper}">{shape}</text>',
        f'<text x="{left}" y="{lower}">{kind}</text>',
        f'<text class="right" x="{right}" y="{lower}">{parameters}</text>',
    ]


def _draw_arrow(end: int) -> list[str]:
    middle = _WIDTH // 2
    return [
        f'<path class="arrow" d="M{middle} {end - _GAP} V{end - 6}"/>',
        f'<path class="tip" d="M{middle} {end - 1} l-4 -7 h8 z"/>',
    ]
