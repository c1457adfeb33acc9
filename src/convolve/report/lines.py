"""Text files that hold whole lines only, and files that are replaced as a whole."""

import os
from pathlib import Path

from convolve.errors import ConvolveError


class LineFile:
    """A text file to append to. A line is with the operating system when `write` returns, all of it or nothing.

    A last line without its end, left by a power cut, is cut off when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        mend(path)
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _failure(path, error) from error

    @property
    def empty(self) -> bool:
        """Whether nothing was written yet, now or by an earlier process."""
        return os.fstat(self._file.fileno()).st_size == 0

    def write(self, line: str) -> None:
        """Append one line; line ends inside it become spaces."""
        rest = memoryview((" ".join(line.splitlines()) + "\n").encode())
        size = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), size)
            raise _failure(self.path, error) from error

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()


def mend(path: Path) -> None:
    """Cut off a last line that has no end."""
    try:
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _failure(path, error) from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader finds the old content or the new, never a part."""
    temp = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with temp.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except OSError as error:
        raise _failure(path, error) from error
    finally:
        temp.unlink(missing_ok=True)


def _failure(path: Path, error: OSError) -> ConvolveError:
    return ConvolveError(f"{path}: cannot be written ({error.strerror}); make room or choose another --log-dir")
