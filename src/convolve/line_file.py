"""Append-only text files of whole lines, for logs that outlive a kill."""

import os
from pathlib import Path
from typing import IO

from convolve.errors import ConvolveError
from convolve.files import describe_write_error, open_folder


class LineFile:
    """Append-only text file. When `write` returns, the operating system has the whole line; if it fails, nothing."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self._file = file

    @classmethod
    def open(cls, path: Path) -> "LineFile":
        """Open a file to append to; an incomplete last line, left by a power cut, is removed first."""
        try:
            descriptor = _open_lines(path)
        except OSError as error:
            raise ConvolveError(describe_write_error(path, error)) from error
        return cls(path, os.fdopen(descriptor, "ab", buffering=0))

    @property
    def empty(self) -> bool:
        """Return True if the file has no lines, not even from an earlier process."""
        return os.fstat(self._file.fileno()).st_size == 0

    def write(self, line: str) -> None:
        """Append one line; line breaks inside it become spaces."""
        rest = memoryview((" ".join(line.splitlines()) + "\n").encode("utf-8", "backslashreplace"))
        size = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), size)
            raise ConvolveError(describe_write_error(self.path, error)) from error

    def close(self) -> None:
        self._file.close()


def _open_lines(path: Path) -> int:
    """Return the descriptor of a text file to append to, without an incomplete last line."""
    with open_folder(path.parent) as folder:
        descriptor = folder.open_file(path.name, os.O_RDWR | os.O_APPEND | os.O_CREAT, single=True)
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read()
        if data and not data.endswith(b"\n"):
            os.ftruncate(descriptor, data.rfind(b"\n") + 1)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
