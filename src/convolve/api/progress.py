"""Where a call shows its progress: a bar on a terminal, one display in a notebook, elsewhere nothing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from convolve.loggers.base import Console, SilentConsole


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def open_progress(progress: bool | Console | None) -> Iterator[Console]:
    """Open the console of a call.

    Args:
        progress: a console, True or False; None shows progress on a terminal and in a notebook.
    """
    if progress is not None and not isinstance(progress, bool):
        yield progress
        return
    console = _choose(progress)
    try:
        yield console
    finally:
        console.close()


def _choose(progress: bool | None) -> Console:
    if progress is False:
        return SilentConsole()
    if in_notebook():
        from convolve.api.notebook import NotebookConsole

        return NotebookConsole()
    from convolve.loggers.terminal import PlainConsole, TerminalConsole

    if sys.stdout is not None and sys.stdout.isatty():
        return TerminalConsole()
    return PlainConsole() if progress else SilentConsole()
