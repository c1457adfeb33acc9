"""A run folder belongs to one training at a time: two of them would prune and overwrite each other's checkpoints."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from convolve.data.lock import hold_lock
from convolve.errors import ParallelError
from convolve.parallel.team import Team

LOCK_FILE = ".claimed"
# Processes of a job that has just been ended may need a moment to leave; a restart after them is no user's mistake.
PATIENCE_SECONDS = 10.0


@contextmanager
def occupy(folder: Path, team: Team) -> Iterator[None]:
    """Hold a run folder while the block runs; all processes of a team end with one line where another one has it.

    The system lets go of it when the holder ends, however it ends. A disk without locks cannot tell, and is believed.
    """
    with ExitStack() as stack:
        refusal = team.tell(_try(folder, stack) if team.first else "").strip()
        if refusal:
            raise ParallelError(refusal)
        yield


def _try(folder: Path, stack: ExitStack) -> str:
    """Take the folder until the stack is closed; otherwise why that cannot be."""
    deadline = time.monotonic() + PATIENCE_SECONDS

    def waiting() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    try:
        stack.enter_context(hold_lock(folder / LOCK_FILE, waiting))
    except TimeoutError:
        return (
            f"{folder}: process {_read_holder(folder)} is training in this run folder; "
            "let it end, or train in another folder"
        )
    except OSError as error:
        return f"{folder}: cannot be written ({error.strerror}); make the run folder writable to train in it"
    return ""


def _read_holder(folder: Path) -> str:
    try:
        return (folder / LOCK_FILE).read_text(encoding="utf-8").strip() or "unknown"
    except OSError:
        return "unknown"
