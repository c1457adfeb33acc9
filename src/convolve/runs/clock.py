"""Time that counts against a time budget: since the command was entered, or since a call in Python."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_called: ContextVar[float | None] = ContextVar("called", default=None)
_IMPORTED = time.monotonic()
_START_FIELD = 19  # of /proc/self/stat after the name of the program: clock ticks from boot to the start


@contextmanager
def count_from_now() -> Iterator[None]:
    """Count from the start of the block instead of the start of the process."""
    token = _called.set(time.monotonic())
    try:
        yield
    finally:
        _called.reset(token)


def elapsed_seconds() -> float:
    """Return the seconds since the start of the process, or of the innermost `count_from_now`."""
    called = _called.get()
    return _process_seconds() if called is None else time.monotonic() - called


def _process_seconds() -> float:
    """Return the seconds since this process started; without /proc, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED
