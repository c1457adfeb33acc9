"""CIFAR-10 and CIFAR-100 in a folder, in the binary or the python version.

A record of the binary version is one label byte, or a coarse and a fine one, of which the fine one is used, and 3,072
bytes of pixels: the red, then the green, then the blue plane, each 32 rows of 32.

The files of the python version are pickles. A pickle is a program, so it is never run. `read_fields` interprets only
the few instructions that the published files use, treats names as plain values and calls nothing. Anything else is an
error. Its results are dicts, lists, strings, numbers and byte arrays.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convolve.data.catalog import DatasetInfo
from convolve.data.dataset import Images, Labels
from convolve.data.loader.in_memory import InMemoryImages, check_images
from convolve.directory import read_regular
from convolve.errors import DataError

Splits = tuple[InMemoryImages, InMemoryImages]
_PIXELS = 3 * 32 * 32
_MAX_INSTRUCTIONS = 2_000_000  # the largest published file has 400,000


def read_binary(folder: Path, entry: DatasetInfo) -> Splits | None:
    """Return the splits of the binary version, or None if the folder has no file of it."""
    names = [file.name for file in entry.files]
    return _read(folder, names, entry, lambda path: _read_records(path, entry))


def read_python(folder: Path, entry: DatasetInfo) -> Splits | None:
    """Return the splits of the python version, or None if the folder has no file of it."""
    names = [file.name.removesuffix(".bin") for file in entry.files]
    return _read(folder, names, entry, lambda path: _read_pickled(path, entry))


def _read(folder: Path, names: list[str], entry: DatasetInfo, read: Any) -> Splits | None:
    missing = [name for name in names if not (folder / name).is_file()]
    if len(missing) == len(names):
        return None
    if missing:
        raise DataError(f"{folder}: {', '.join(missing)} missing; add all files of {entry.name}")
    parts = [read(folder / name) for name in names]
    return _join(parts[:-1], folder, entry), _join(parts[-1:], folder, entry)


def _join(parts: list[tuple[Images, Labels]], folder: Path, entry: DatasetInfo) -> InMemoryImages:
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    planes = torch.from_numpy(images).view(-1, 3, 32, 32).permute(0, 2, 3, 1)
    return check_images(planes.contiguous().numpy(), labels, classes=len(entry.classes), source=str(folder))


def _read_records(path: Path, entry: DatasetInfo) -> tuple[Images, Labels]:
    labels = 1 if len(entry.classes) <= 10 else 2
    size = path.stat().st_size
    if size > entry.limit or size % (labels + _PIXELS) or not size:
        raise DataError(f"{path}: {size} bytes: must be records of {labels + _PIXELS} bytes; get an undamaged copy")
    records = np.frombuffer(read_regular(path), np.uint8).reshape(-1, labels + _PIXELS)
    return records[:, labels:], records[:, labels - 1].astype(np.int64)


def _read_pickled(path: Path, entry: DatasetInfo) -> tuple[Images, Labels]:
    fields = read_fields(path, limit=entry.limit)
    labels = fields.get(b"labels") if len(entry.classes) <= 10 else fields.get(b"fine_labels")
    data = fields.get(b"data")
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != _PIXELS:
        raise DataError(f"{path}: contains no array of images; use the binary version of the data")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataError(f"{path}: contains no list of labels; use the binary version of the data")
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
class _Object:
    """The object that calling a name would have created: the name, its arguments, and the state that was set."""

    name: _Name
    arguments: tuple[Any, ...]
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
        mark = next(index for index in range(len(self.stack) - 1, -1, -1) if self.stack[index] is _MARK)
        items = self.stack[mark + 1 :]
        del self.stack[mark:]
        return items

    def tuple_of(self, count: int) -> None:
        items = tuple(self.stack[-count:]) if count else ()
        del self.stack[len(self.stack) - count :]
        self.stack.append(items)

    def name(self) -> None:
        name = _Name(self.line(), self.line())
        if (name.module, name.name) not in _NAMES:
            raise ValueError(f"it needs {name.module}.{name.name}, which data files do not use")
        self.stack.append(name)

    def call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise ValueError("it calls something that is not a name")
        self.stack.append(_Object(name, arguments))

    def build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Object):
            raise ValueError("it sets the state of something that has none")
        self.stack[-1].state = state

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to something that is not a list")
        self.stack[-1].extend(items)

    def fill(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict) or len(items) % 2:
            raise ValueError("it fills something that is not a dict")
        if not all(isinstance(key, bytes) for key in items[::2]):  # the hash of nested tuples recurses, without a limit
            raise ValueError("it has a key that is not a string")
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
    """Return the fields of one published file: lists of numbers and strings, and byte arrays [N, M]."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise DataError(f"{path}: {size} bytes, more than the {limit} that are accepted")
        fields = _run(read_regular(path))
        if not isinstance(fields, dict):
            raise ValueError("it does not contain a dict")
        return {key: _to_array(value) if isinstance(value, _Object) else value for key, value in fields.items()}
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror or error})") from error
    except (ValueError, TypeError, LookupError, StopIteration, struct.error, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split()) or "it is malformed"
        raise DataError(
            f"{path}: not a published CIFAR file ({reason}); pickles are never run: use the binary version of the data"
        ) from error


def _run(data: bytes) -> Any:
    machine = _Machine(data)
    for _ in range(_MAX_INSTRUCTIONS):
        code = machine.take(1)[0]
        if code == ord("."):
            return machine.stack[-1]
        if code not in _STEPS:
            raise ValueError(f"instruction {code:#04x} at byte {machine.at - 1}")
        _STEPS[code](machine)
    raise ValueError(f"more than {_MAX_INSTRUCTIONS} instructions")


def _to_array(described: _Object) -> Images:
    """Return the array that a reconstruction with its state describes: unsigned bytes in row order."""
    state = described.state
    if described.name.name != "_reconstruct" or not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("it contains something other than arrays")
    _, shape, dtype, by_columns, data = state
    if not isinstance(dtype, _Object) or dtype.arguments[:1] != (b"u1",) or by_columns or not isinstance(data, bytes):
        raise ValueError("its array is not bytes in row order")
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise ValueError("the shape of its array is not numbers")
    return np.frombuffer(data, np.uint8).reshape(shape)
