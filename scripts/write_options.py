"""Write src/convolve/config/options.py: every option of the schema as typed keyword arguments.

Run it after a change of an option: `python scripts/write_options.py`. A test fails if the file is not current.
"""

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from convolve.config.schema import SECTIONS

TARGET = Path(__file__).parents[1] / "src" / "convolve" / "config" / "options.py"
NAMES = {
    "model": "ModelOptions",
    "data": "DataOptions",
    "optim": "OptimOptions",
    "schedule": "ScheduleOptions",
    "precision": "PrecisionOptions",
    "parallel": "LayoutOptions",
    "run": "RunOptions",
    "log": "LogOptions",
}
PARAMETERS = ("model", "metrics")
"""Options that are parameters of `convolve.train` with more types."""
OBJECTS = ("optimizer", "augment")
"""Options that also accept a class or function of the user's code, in Python."""
HEAD = '''"""The options of a run as typed keyword arguments. Written by scripts/write_options.py; do not edit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypedDict
'''
TAIL = '''

class ResumeOptions(LayoutOptions, total=False):
    """What may be given when a run is resumed: its length, its layout over processes, and the user's code again."""

    epochs: float | None
    iterations: int | None
    optimizer: str | Callable[..., object]
    augment: str | Callable[..., object]


class Options(
    {bases},
    total=False,
):
    """The options of `convolve.train`, by the names of the command line with underscores."""


class ConfigOptions(Options, total=False):
    """All options of a config."""

    model: str
    metrics: bool
'''


def spell(annotation: Any) -> str:
    """Return an annotation as source text; options take any sequence for a tuple and a string for a path."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(spell(part) for part in parts)
    if origin is Literal:
        choices = ", ".join(f'"{part}"' if isinstance(part, str) else repr(part) for part in parts)
        return f"Literal[{choices}]"
    if origin is tuple:
        return f"Sequence[{spell(parts[0])}]"
    if annotation is type(None):
        return "None"
    return "str | Path" if annotation is Path else str(annotation.__name__)


def spell_option(name: str, annotation: Any) -> str:
    """Return the type of an option as source text."""
    return "str | Callable[..., object]" if name in OBJECTS else spell(annotation)


def render() -> str:
    """Return the text of options.py."""
    text = HEAD
    for section, kind in SECTIONS.items():
        options = {name: info.annotation for name, info in kind.model_fields.items() if name not in PARAMETERS}
        fields = "\n".join(f"    {name}: {spell_option(name, annotation)}" for name, annotation in options.items())
        text += f'\n\nclass {NAMES[section]}(TypedDict, total=False):\n    """{kind.__doc__}"""\n\n{fields}\n'
    return text + TAIL.format(bases=",\n    ".join(NAMES.values()))


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(TARGET)
