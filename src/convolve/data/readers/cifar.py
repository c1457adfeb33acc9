"""CIFAR-10 and CIFAR-100 in a folder, in the binary version (fixed records) or the python version (see `pickled.py`).

A binary record is one label byte, or a coarse and a fine one, of which the fine one counts, and 3,072 bytes of pixels:
the red, then the green, then the blue plane, each 32 rows of 32.

The python version of CIFAR, read without unpickling.

A pickle is a program, so it is never run here. This reader knows the few instructions that the published files consist
of, keeps names as plain marks and calls nothing: whatever else a file asks for is an error. What comes out are dicts,
lists, texts, numbers, and byte arrays.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convolve.data.catalog import DatasetInfo
from convolve.data.dataset import Images, Labels, Split, make_split
from convolve.errors import DataError

_PIXELS = 3 * 32 * 32


def read_binary(folder: Path, entry: DatasetInfo) -> tuple[Split, Split] | None:
    """The splits of the binary version; None where no file of it is there."""
    names = [file.name for file in entry.files]
    return _read(folder, names, entry, lambda path: _read_records(path, entry))


def read_python(folder: Path, entry: DatasetInfo) -> tuple[Split, Split] | None:
    """The splits of the python version; None where no file of it is there."""
    names = [file.name.removesuffix(".bin") for file in entry.files]
    return _read(folder, names, entry, lambda path: _read_pickled(path, entry))


def _read(folder: Path, names: list[str], entry: DatasetInfo, read: Any) -> tuple[Split, Split] | None:
    missing = [name for name in names if not (folder / name).is_file()]
    if len(missing) == len(names):
        return None
    if missing:
        raise DataError(f"{folder}: {', '.join(missing)} missing; put all files of {entry.name} there")
    parts = [read(folder / name) for name in names]
    return _join(parts[:-1], folder, entry), _join(parts[-1:], folder, entry)


def _join(parts: list[tuple[Images, Labels]], folder: Path, entry: DatasetInfo) -> Split:
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    planes = torch.from_numpy(images).view(-1, 3, 32, 32).permute(0, 2, 3, 1)
    return make_split(planes.contiguous().numpy(), labels, classes=len(entry.classes), where=str(folder))


def _read_records(path: Path, entry: DatasetInfo) -> tuple[Images, Labels]:
    labels = 1 if len(entry.classes) <= 10 else 2
    size = path.stat().st_size
    if size > entry.limit or size % (labels + _PIXELS) or not size:
        raise DataError(f"{path}: {size} bytes: must be records of {labels + _PIXELS} bytes; get an undamaged copy")
    records = np.fromfile(path, np.uint8).reshape(-1, labels + _PIXELS)
    return records[:, labels:], records[:, labels - 1].astype(np.int64)


def _read_pickled(path: Path, entry: DatasetInfo) -> tuple[Images, Labels]:
    fields = read_fields(path, limit=entry.limit)
    labels = fields.get(b"labels") if len(entry.classes) <= 10 else fields.get(b"fine_labels")
    data = fields.get(b"data")
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != _PIXELS:
        raise DataError(f"{path}: no array of images in it; use the binary version of the data")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataError(f"{path}: no list of labels in it; use the binary version of the data")
    return data, np.array(labels, np.int64)


_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}

_MARK = object()


@dataclass(frozen=True)
class _Name:
    module: str
    name: str


@dataclass
class _Made:
    """What calling a name would have made: the name, what it was given, and the state that was set."""

    name: _Name
    given: tuple[Any, ...]
    state: Any = None


@dataclass
class _Machine:
    data: bytes
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def take(self, count: int) -> bytes:
        if count < 0 or count > len(self.data) - self.at:
            raise ValueError("it is cut off")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def protocol(self) -> None:
        if self.number("<B") > 2:
            raise ValueError("it was saved again in a newer protocol")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.take(end - self.at).decode("ascii")
        self.at += 1
        return text

    def since_mark(self) -> list[Any]:
        place = next(index for index in range(len(self.stack) - 1, -1, -1) if self.stack[index] is _MARK)
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def tuple_of(self, count: int) -> None:
        items = tuple(self.stack[-count:]) if count else ()
        del self.stack[len(self.stack) - count :]
        self.stack.append(items)

    def name(self) -> None:
        name = _Name(self.line(), self.line())
        if (name.module, name.name) not in _NAMES:
            raise ValueError(f"it asks for {name.module}.{name.name}, which a data file has no use for")
        self.stack.append(name)

    def call(self) -> None:
        given, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Name) or not isinstance(given, tuple):
            raise ValueError("it calls what is not a name")
        self.stack.append(_Made(name, given))

    def build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Made):
            raise ValueError("it sets the state of what has none")
        self.stack[-1].state = state

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to what is not a list")
        self.stack[-1].extend(items)

    def fill(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict) or len(items) % 2:
            raise ValueError("it fills what is not a dict")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)


_STEPS: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda m: m.protocol(),
    ord("("): lambda m: m.push(_MARK),
    ord("}"): lambda m: m.push({}),
    ord("]"): lambda m: m.push([]),
    ord(")"): lambda m: m.push(()),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    ord("J"): lambda m: m.push(m.number("<i")),
    ord("U"): lambda m: m.push(m.take(m.number("<B"))),
    ord("T"): lambda m: m.push(m.take(m.number("<i"))),
    ord("X"): lambda m: m.push(m.take(m.number("<I"))),
    ord("q"): lambda m: m.put(m.number("<B")),
    ord("r"): lambda m: m.put(m.number("<I")),
    ord("h"): lambda m: m.push(m.memo[m.number("<B")]),
    ord("j"): lambda m: m.push(m.memo[m.number("<I")]),
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("e"): lambda m: m.extend(m.since_mark()),
    ord("s"): lambda m: m.fill([m.stack.pop(-2), m.stack.pop()]),
    ord("u"): lambda m: m.fill(m.since_mark()),
    ord("t"): lambda m: m.push(tuple(m.since_mark())),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("c"): lambda m: m.name(),
    ord("R"): lambda m: m.call(),
    ord("b"): lambda m: m.build(),
}


def read_fields(path: Path, *, limit: int) -> dict[bytes, Any]:
    """The fields of one published file: lists of numbers and texts, and byte arrays [N, M]."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise DataError(f"{path}: {size} bytes, more than the {limit} that are accepted")
        found = _run(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it does not hold a dict")
        return {key: _to_array(value) if isinstance(value, _Made) else value for key, value in found.items()}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, TypeError, LookupError, StopIteration, struct.error, UnicodeDecodeError) as error:
        told = " ".join(str(error).split()) or "it is malformed"
        raise DataError(
            f"{path}: not a published CIFAR file ({told}); pickles are never run: use the binary version of the data"
        ) from error


def _run(data: bytes) -> Any:
    machine = _Machine(data)
    while True:
        code = machine.take(1)[0]
        if code == ord("."):
            return machine.stack[-1]
        if code not in _STEPS:
            raise ValueError(f"instruction {code:#04x} at byte {machine.at - 1}")
        _STEPS[code](machine)


def _to_array(made: _Made) -> Images:
    """The array that a reconstruction with its state describes: unsigned bytes in rows."""
    if made.name.name != "_reconstruct" or not isinstance(made.state, tuple) or len(made.state) != 5:
        raise ValueError("it holds something other than arrays")
    _, shape, kind, by_columns, contents = made.state
    if not isinstance(kind, _Made) or kind.given[:1] != (b"u1",) or by_columns or not isinstance(contents, bytes):
        raise ValueError("its array does not hold bytes in rows")
    return np.frombuffer(contents, np.uint8).reshape(shape)
