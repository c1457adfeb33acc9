"""Every public name of convolve and its signature. `python tests/api_listing.py` rewrites the recorded list."""

import inspect
from pathlib import Path

import convolve

RECORD = Path(__file__).parent / "contract" / "api.txt"
PACKAGES = {"convolve": convolve, "convolve.data": convolve.data, "convolve.models": convolve.models}


def listing():
    """Return one line per function, class and public member, sorted within each package."""
    lines = []
    for prefix, package in PACKAGES.items():
        for name in sorted(package.__all__):
            value = getattr(package, name)
            if not inspect.ismodule(value):
                lines += describe(f"{prefix}.{name}", value)
    return "\n".join(lines) + "\n"


def describe(name, value):
    if not inspect.isclass(value):
        return [f"{name}{inspect.signature(value)}" if callable(value) else name]
    bases = ", ".join(base.__name__ for base in value.__bases__)
    lines = [f"class {name}({bases})"]
    if issubclass(value, BaseException):
        return lines
    own = {
        key: member
        for kind in value.__mro__
        if kind.__module__.startswith("convolve")
        for key, member in vars(kind).items()
    }
    fields = {key for kind in value.__mro__ for key in getattr(kind, "__annotations__", {})}
    for key in sorted({*own, *fields}):
        if key.startswith("_") or key == "model_config":
            continue
        member = inspect.unwrap(own.get(key)) if callable(own.get(key)) else own.get(key)
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        signature = str(inspect.signature(member)) if inspect.isfunction(member) else ""
        lines.append(f"  {key}{signature}")
    return lines


if __name__ == "__main__":
    RECORD.write_text(listing(), encoding="utf-8")
