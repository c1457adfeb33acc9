"""Observers of emulated values: traps, dumps and exponent surveys.

    OverflowTrap     stops the run at the first result that leaves its format
    StepDump         writes all results of chosen steps
    OverflowDump     writes the first operation that overflows, with its inputs
    ExponentSurvey   counts, for each layer and direction, exponents and values too small or too large for the format

Dumps are safetensors files; statistics of every tensor are in the metadata under "statistics", as JSON.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from convolve.errors import ConfigError, NumericsError
from convolve.files import atomic_file
from convolve.numerics.emulator import NullObserver, Observer, OverflowEvent
from convolve.numerics.formats import Format
from convolve.numerics.op_location import OpLocation
from convolve.numerics.rounding import Flags
from convolve.run_files import dump_name, overflow_dump_name

MIN_EXPONENT, MAX_EXPONENT = -40, 40
_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


def parse_steps(text: str) -> list[range]:
    """Parse steps and ranges such as `10|20|30-35`; both ends of a range are included."""
    ranges = []
    for part in text.replace(",", "|").split("|"):
        match = _STEPS.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(f"--data-dump-step {text}: '{part}' is not a step; write steps as in 10|20|30-35")
        ranges.append(range(first, last + 1))
    return ranges


def describe_problem(event: OverflowEvent) -> str:
    """Name what is wrong with a result."""
    if event.flags & Flags.NAN:
        return "invalid result (NaN)"
    divides = event.operation.startswith(("div", "reciprocal", "rsqrt"))
    return "division by zero" if event.flags & Flags.INFINITY and divides else "overflow"


class Observers:
    """Forwards every call to several observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def on_step_start(self, step: int) -> None:
        for observer in self._observers:
            observer.on_step_start(step)

    def on_step_end(self) -> None:
        for observer in self._observers:
            observer.on_step_end()

    def observes_results(self) -> bool:
        return any(observer.observes_results() for observer in self._observers)

    def on_result(self, location: OpLocation, operation: str, result: Tensor) -> None:
        for observer in self._observers:
            if observer.observes_results():
                observer.on_result(location, operation, result)

    def on_rounded(self, location: OpLocation, operation: str, result: Tensor) -> None:
        for observer in self._observers:
            if observer.observes_results():
                observer.on_rounded(location, operation, result)

    def on_overflow(self, event: OverflowEvent) -> None:
        for observer in self._observers:
            observer.on_overflow(event)


@dataclass
class _StepObserver(NullObserver):
    """Keeps the number of the current step; None in evaluation."""

    step: int | None = field(default=None, kw_only=True)

    def on_step_start(self, step: int) -> None:
        self.step = step

    def on_step_end(self) -> None:
        self.step = None


@dataclass
class OverflowTrap(_StepObserver):
    """Stops the run at the first overflow, invalid result or division by zero."""

    def on_overflow(self, event: OverflowEvent) -> None:
        when = "in evaluation" if self.step is None else f"at step {self.step}"
        layer, direction = event.location.layer or "network", event.location.direction
        raise NumericsError(
            f"{describe_problem(event)} in layer {layer}, {direction}, {when} "
            f"({event.operation}): stopped by --fp-exceptions; lower --loss-scaling or --learning-rate, "
            "or set --saturate-on-overflow"
        )


@dataclass
class OverflowDump(_StepObserver):
    """Writes the first operation of training whose result left the format, once in a run."""

    folder: Path
    written: Path | None = None

    def on_overflow(self, event: OverflowEvent) -> None:
        if self.written is not None or self.step is None:
            return
        tensors = {f"input.{n}": x for n, x in enumerate(event.inputs) if isinstance(x, Tensor)}
        tensors.update({f"result.{n}": x for n, x in enumerate(event.results)})
        metadata = {"layer": event.location.layer, "direction": event.location.direction}
        metadata |= {"operation": event.operation, "trouble": describe_problem(event), "step": str(self.step)}
        self.written = write_dump(self.folder / overflow_dump_name(self.step), tensors, metadata)


@dataclass
class StepDump(_StepObserver):
    """Writes all results of chosen steps, after rounding."""

    folder: Path
    steps: list[range]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def on_step_start(self, step: int) -> None:
        self.step = step if any(step in chosen for chosen in self.steps) else None

    def observes_results(self) -> bool:
        return self.step is not None

    def on_rounded(self, location: OpLocation, operation: str, result: Tensor) -> None:
        stem = f"{location.layer or 'network'}:{location.direction}:{operation}"
        index = sum(name.startswith(f"{stem}:") for name in self.tensors)
        self.tensors[f"{stem}:{index}"] = result.detach().clone(memory_format=torch.contiguous_format)

    def on_step_end(self) -> None:
        if self.step is not None:
            path = self.folder / dump_name(self.step)
            write_dump(path, self.tensors, {"step": str(self.step)})
        self.step, self.tensors = None, {}


def write_dump(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Path:
    """Write tensors with metadata and the statistics of each tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    statistics = {name: describe_tensor(x) for name, x in plain.items()}
    with atomic_file(path) as draft:
        save_file(plain, draft, metadata={**metadata, "statistics": json.dumps(statistics)})
    return path


def describe_tensor(x: Tensor) -> dict[str, Any]:
    """Return shape, range, fraction of zeros and number of non-finite values of a tensor."""
    if not x.is_floating_point() or not x.numel():
        return {"shape": list(x.shape)}
    finite = x[x.isfinite()].double()
    size = finite.abs()
    return {
        "shape": list(x.shape),
        "mean": float(finite.mean()) if finite.numel() else None,
        "largest": float(size.max()) if finite.numel() else None,
        "smallest": float(size[size > 0].min()) if bool((size > 0).any()) else None,
        "zeros_share": float((x == 0).double().mean()),
        "not_finite": int(x.numel() - finite.numel()),
    }


@dataclass
class ExponentHistogram:
    """Counts of one layer and direction. Fractions are of all values that are not zero."""

    values: int = 0
    nonzero: int = 0
    lost: int = 0
    subnormal: int = 0
    over: int = 0
    exponents: list[int] = field(default_factory=lambda: [0] * (MAX_EXPONENT - MIN_EXPONENT + 1))

    def add(self, x: Tensor, target: Format) -> None:
        """Count a result before it is rounded."""
        size = x.detach().abs()
        finite = size[(size > 0) & size.isfinite()]
        self.values += x.numel()
        self.nonzero += int((size != 0).sum())
        # Half of the smallest number and all below it round to zero.
        self.lost += int((finite <= target.smallest / 2).sum())
        self.subnormal += int((finite < target.smallest_normal).sum())
        self.over += int((size > target.largest).sum()) + int(size.isnan().sum())
        bins = (torch.frexp(finite).exponent - 1).clamp(MIN_EXPONENT, MAX_EXPONENT).long() - MIN_EXPONENT
        counts = torch.bincount(bins, minlength=MAX_EXPONENT - MIN_EXPONENT + 1).tolist()
        self.exponents = [a + b for a, b in zip(self.exponents, counts, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return fractions, and the histogram from the first to the last exponent that occurs."""
        nonzero = max(self.nonzero, 1)
        used = [n for n, count in enumerate(self.exponents) if count]
        first, last = (used[0], used[-1]) if used else (0, -1)
        return {
            "values": self.values,
            "zero_share": 1 - self.nonzero / max(self.values, 1),
            "underflow_share": self.lost / nonzero,
            "subnormal_share": self.subnormal / nonzero,
            "overflow_share": self.over / nonzero,
            "first_exponent": MIN_EXPONENT + first,
            "exponents": self.exponents[first : last + 1],
        }


@dataclass
class ExponentSurvey(_StepObserver):
    """Histograms of all layers in every `every`-th step; `emit` receives the step and the histograms by location."""

    every: int
    target: Format
    emit: Callable[[int, dict[str, Any]], None]
    histograms: dict[str, ExponentHistogram] = field(default_factory=dict)

    def on_step_start(self, step: int) -> None:
        self.step = step if step % self.every == 0 else None

    def observes_results(self) -> bool:
        return self.step is not None

    def on_result(self, location: OpLocation, operation: str, result: Tensor) -> None:
        name = f"{location.layer or 'network'}/{location.direction}"
        self.histograms.setdefault(name, ExponentHistogram()).add(result, self.target)

    def on_step_end(self) -> None:
        if self.step is not None:
            self.emit(self.step, {name: histogram.to_json() for name, histogram in self.histograms.items()})
        self.step, self.histograms = None, {}
