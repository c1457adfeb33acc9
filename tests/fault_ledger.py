"""The kinds of faults that convolve promises to survive, how often each is tried, and a ledger of what was done."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")

BITS, LINE, EITHER = "equal bits", "one clear line", "equal bits or one clear line"
PROMISED = {
    "SIGKILL, one process": (150, BITS),
    "SIGKILL during a save": (50, BITS),
    "SIGKILL, 2 replicas": (50, BITS),
    "SIGKILL, 2 stages": (50, BITS),
    "SIGKILL, 3 uneven replicas": (20, BITS),
    "SIGKILL, 4 replicas": (20, BITS),
    "SIGKILL, 2 x 2": (20, BITS),
    "SIGKILL, sharded state": (20, BITS),
    "SIGKILL, batch-norm span": (20, BITS),
    "SIGKILL of the command": (3, BITS),
    "SIGKILL at a stage of a save": (26, BITS),
    "SIGKILL of one of two savers": (23, BITS),
    "SIGKILL at a system call of a save": (40, BITS),
    "I/O error at a system call of a save": (40, EITHER),
    "full disk at a system call of a save": (40, EITHER),
    "full disk": (4, LINE),
    "read-only folder": (2, LINE),
    "checkpoint file cut at a 64th": (320, LINE),
    "checkpoint byte flipped": (256, LINE),
    "safetensors header fuzzed": (4000, EITHER),
    "clock jump during a run": (40, BITS),
    "two runs in one folder": (20, LINE),
    "data deleted during a run": (5, EITHER),
    "input cut at a 64th": (640, EITHER),
    "input byte flipped": (3000, EITHER),
    "image fuzzed": (8400, EITHER),
    "tar or TFRecord fuzzed": (2800, EITHER),
    "YAML fuzzed": (5000, EITHER),
    "flags fuzzed": (5000, EITHER),
    "input that cannot be read": (5, LINE),
    "pickle offered as another file": (240, LINE),
    "mutated input of a fuzz target": (20_000, EITHER),
    "hostile checkpoint": (768, EITHER),
    "hostile request": (2000, EITHER),
}
_MARK = "fault: "


class Ledger:
    """Counts the faults of one test; a fault counts once the checks after it have passed."""

    def __init__(self, properties: list[tuple[str, Any]]) -> None:
        self._properties = properties
        self._counts = Counter[str]()

    def each(self, kind: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items; each counts once the body of the loop has passed with it."""
        for item in items:
            with self.one(kind):
                yield item

    @contextmanager
    def one(self, kind: str) -> Iterator[None]:
        """Count one fault once the block has passed."""
        assert kind in PROMISED, f"{kind!r} is not in the table of {__name__}"
        yield
        self._counts[kind] += 1
        self._properties[:] = [entry for entry in self._properties if not entry[0].startswith(_MARK)]
        self._properties += [(_MARK + name, count) for name, count in self._counts.items()]


def add_up(reports: Iterable[Any]) -> Counter[str]:
    """Return the sums of what the tests of these reports counted."""
    done = Counter[str]()
    for report in reports:
        for name, count in report.user_properties if report.when == "call" else ():
            if name.startswith(_MARK):
                done[name.removeprefix(_MARK)] += count
    return done


def find_missing(done: Counter[str]) -> list[str]:
    """Return the kinds that were tried less often than promised."""
    return [kind for kind, (promised, _) in PROMISED.items() if done[kind] < promised]


def lay_out(done: Counter[str]) -> list[str]:
    """Return one table of all kinds."""
    width = max(map(len, PROMISED))
    lines = [f"{'kind of fault':{width}}    done  promised  each ended with"]
    lines += [f"{kind:{width}} {done[kind]:7,} {count:9,}  {end}" for kind, (count, end) in PROMISED.items()]
    return [*lines, f"{'all':{width}} {sum(done.values()):7,}"]
