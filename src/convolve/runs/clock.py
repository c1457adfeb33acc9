"""Time since the process started, for time budgets: a user counts from the moment a command was entered."""

import os
import time
from pathlib import Path

_IMPORTED = time.monotonic()
_START_FIELD = 19  # of /proc/self/stat after the name of the program: clock ticks from boot to the start


def process_seconds() -> float:
    """Return the seconds since this process started; without /proc, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED
