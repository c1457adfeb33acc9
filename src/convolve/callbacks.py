"""`convolve.callbacks.register`: offer a callback or logger under a name.

A callback is a `convolve.Callback`, or a class or function without arguments that makes one. A logger is a callback.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from convolve import plugins

CallbackT = TypeVar("CallbackT", bound=Callable[[], Any])


def register(name: str) -> Callable[[CallbackT], CallbackT]:
    """Return a decorator for a class or function that makes a callback by this name: `train(..., callbacks=[name])`.

    On the command line: `--plugin FILE.py --callbacks name`.
    """
    return plugins.CALLBACKS.decorator(name)
