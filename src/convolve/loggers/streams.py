"""Standard output and error that may be closed, full, a lost terminal or without Unicode."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def prepare_streams() -> None:
    """Open closed streams as the null device, and escape what the encoding of a stream does not have."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the process exits)
        elif isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # a stream whose file was exchanged cannot be reconfigured
                stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Discard everything printed from now on, also what is still buffered."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextmanager
def dropping_output() -> Iterator[None]:
    """Run a block that prints. If the output is a closed pipe, a full disk or a lost terminal, discard it and continue.

    A run has its log files; the end of its terminal must not be the end of the run.
    """
    try:
        yield
    except (OSError, SystemExit):  # rich exits on a closed pipe
        drop_output()


def print_line(line: str) -> None:
    """Print one line immediately, or nothing if the output is gone."""
    with dropping_output():
        print(line, flush=True)
