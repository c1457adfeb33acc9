"""Looking at numbers while they are computed: traps, dumps, and surveys of exponents.

    Trap           ends the run at the first result that leaves its format
    StepDump       writes all results of chosen steps
    OverflowDump   writes the operation that overflows first, with its inputs
    Survey         counts, for each layer and direction, exponents, and values too small or too large for the format

Dumps are safetensors; statistics of every tensor are in the metadata under "statistics", as JSON.
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
    """The steps in a text such as `10|20|30-35`, both ends included."""
    ranges = []
    for part in text.replace(",", "|").split("|"):
        match = _STEPS.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(f"data-dump-step={text}: '{part}' is no step; write steps and ranges as in 10|20|30-35")
        ranges.append(range(first, last + 1))
    return ranges


def describe_problem(meeting: OverflowEvent) -> str:
    """What kind of trouble a result is."""
    if meeting.flags & Flags.NAN:
        return "invalid result (NaN)"
    divides = meeting.operation.startswith(("div", "reciprocal", "rsqrt"))
    return "division by zero" if meeting.flags & Flags.INFINITY and divides else "overflow"


class Observers:
    """Many watchers as one."""

    def __init__(self, watchers: Sequence[Observer]) -> None:
        self._watchers = tuple(watchers)

    def begin(self, step: int) -> None:
        """Tell all of them."""
        for watcher in self._watchers:
            watcher.begin(step)

    def end(self) -> None:
        """Tell all of them."""
        for watcher in self._watchers:
            watcher.end()

    def watching(self) -> bool:
        """Whether one of them wants results."""
        return any(watcher.watching() for watcher in self._watchers)

    def see(self, place: OpLocation, operation: str, result: Tensor) -> None:
        """Show it to those who want it."""
        for watcher in self._watchers:
            if watcher.watching():
                watcher.see(place, operation, result)

    def keep(self, place: OpLocation, operation: str, result: Tensor) -> None:
        """Show it to those who want it."""
        for watcher in self._watchers:
            if watcher.watching():
                watcher.keep(place, operation, result)

    def meet(self, meeting: OverflowEvent) -> None:
        """Tell all of them."""
        for watcher in self._watchers:
            watcher.meet(meeting)


@dataclass
class OverflowTrap(NullObserver):
    """Ends the run at the first overflow, invalid result or division by zero."""

    step: int | None = None

    def begin(self, step: int) -> None:
        """Remember the step, for the message."""
        self.step = step

    def end(self) -> None:
        """What comes until the next step is evaluation."""
        self.step = None

    def meet(self, meeting: OverflowEvent) -> None:
        """Name layer, direction and step, and stop."""
        when = "in evaluation" if self.step is None else f"at step {self.step}"
        direction = "backward" if meeting.place.backward else "forward"
        raise NumericsError(
            f"{describe_problem(meeting)} in layer {meeting.place.layer or 'network'}, {direction}, {when} "
            f"({meeting.operation}): fp-exceptions ends the run; lower --loss-scaling or --learning-rate, "
            "or set --saturate-on-overflow"
        )


@dataclass
class OverflowDump(NullObserver):
    """Writes the first operation whose result left the format."""

    folder: Path
    step: int | None = None
    written: Path | None = None

    def begin(self, step: int) -> None:
        """Remember the step."""
        self.step = step

    def end(self) -> None:
        """What comes until the next step is evaluation, which is not dumped."""
        self.step = None

    def meet(self, meeting: OverflowEvent) -> None:
        """Write inputs and results, once in a run."""
        if self.written is not None or self.step is None:
            return
        tensors = {f"input.{n}": x for n, x in enumerate(meeting.inputs) if isinstance(x, Tensor)}
        tensors.update({f"result.{n}": x for n, x in enumerate(meeting.results)})
        facts = {"layer": meeting.place.layer, "direction": "backward" if meeting.place.backward else "forward"}
        facts |= {"operation": meeting.operation, "trouble": describe_problem(meeting), "step": str(self.step)}
        self.written = write_dump(self.folder / overflow_dump_name(self.step), tensors, facts)


@dataclass
class StepDump(NullObserver):
    """Writes all results of chosen steps, as the network went on with them."""

    folder: Path
    steps: list[range]
    step: int | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        """Start to collect if this step was chosen."""
        self.step = step if any(step in chosen for chosen in self.steps) else None

    def watching(self) -> bool:
        """Whether this step was chosen."""
        return self.step is not None

    def keep(self, place: OpLocation, operation: str, result: Tensor) -> None:
        """Take a copy."""
        direction = "backward" if place.backward else "forward"
        stem = f"{place.layer or 'network'}:{direction}:{operation}"
        number = sum(name.startswith(f"{stem}:") for name in self.tensors)
        self.tensors[f"{stem}:{number}"] = result.detach().clone(memory_format=torch.contiguous_format)

    def end(self) -> None:
        """Write what was collected."""
        if self.step is not None:
            path = self.folder / dump_name(self.step)
            write_dump(path, self.tensors, {"step": str(self.step)})
        self.step, self.tensors = None, {}


def write_dump(path: Path, tensors: dict[str, Tensor], facts: dict[str, str]) -> Path:
    """Write tensors with their statistics."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    statistics = {name: describe_tensor(x) for name, x in plain.items()}
    with atomic_file(path) as draft:
        save_file(plain, draft, metadata={**facts, "statistics": json.dumps(statistics)})
    return path


def describe_tensor(x: Tensor) -> dict[str, Any]:
    """Shape, range and odd values of a tensor, in plain numbers."""
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
    """What was counted in one layer and direction; shares are of all values that are not zero."""

    values: int = 0
    nonzero: int = 0
    lost: int = 0
    subnormal: int = 0
    over: int = 0
    exponents: list[int] = field(default_factory=lambda: [0] * (MAX_EXPONENT - MIN_EXPONENT + 1))

    def add(self, x: Tensor, target: Format) -> None:
        """Count a result before it is rounded."""
        size = x.detach().abs()
        kept = size[(size > 0) & size.isfinite()]
        self.values += x.numel()
        self.nonzero += int((size != 0).sum())
        # Half of the smallest number and all below it round to zero.
        self.lost += int((kept <= target.smallest / 2).sum())
        self.subnormal += int((kept < target.smallest_normal).sum())
        self.over += int((size > target.largest).sum()) + int(size.isnan().sum())
        bins = (torch.frexp(kept).exponent - 1).clamp(MIN_EXPONENT, MAX_EXPONENT).long() - MIN_EXPONENT
        counts = torch.bincount(bins, minlength=MAX_EXPONENT - MIN_EXPONENT + 1).tolist()
        self.exponents = [a + b for a, b in zip(self.exponents, counts, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Shares, and the histogram from its first to its last exponent that occurs."""
        whole = max(self.nonzero, 1)
        used = [n for n, count in enumerate(self.exponents) if count]
        first, last = (used[0], used[-1]) if used else (0, -1)
        return {
            "values": self.values,
            "zero_share": 1 - self.nonzero / max(self.values, 1),
            "underflow_share": self.lost / whole,
            "subnormal_share": self.subnormal / whole,
            "overflow_share": self.over / whole,
            "first_exponent": MIN_EXPONENT + first,
            "exponents": self.exponents[first : last + 1],
        }


@dataclass
class ExponentSurvey(NullObserver):
    """Every so many steps, a census of all layers; `tell` gets the step and the counts by place."""

    every: int
    target: Format
    tell: Callable[[int, dict[str, Any]], None]
    step: int | None = None
    counts: dict[str, ExponentHistogram] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        """Start to count if it is time."""
        self.step = step if step % self.every == 0 else None

    def watching(self) -> bool:
        """Whether this step is counted."""
        return self.step is not None

    def see(self, place: OpLocation, operation: str, result: Tensor) -> None:
        """Count a result before it is rounded."""
        name = f"{place.layer or 'network'}/{'backward' if place.backward else 'forward'}"
        self.counts.setdefault(name, ExponentHistogram()).add(result, self.target)

    def end(self) -> None:
        """Tell what was counted."""
        if self.step is not None:
            self.tell(self.step, {name: census.to_json() for name, census in self.counts.items()})
        self.step, self.counts = None, {}
