"""`convolve.losses.register`: offer a loss under a name.

A loss is a function of outputs [N, classes] and labels [N] that returns one value per sample.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from convolve import plugins

LossT = TypeVar("LossT", bound=Callable[..., Any])


def register(name: str) -> Callable[[LossT], LossT]:
    """Return a decorator for a function that becomes a loss by this name: `train(..., loss=name)`."""
    return plugins.LOSSES.decorator(name)
