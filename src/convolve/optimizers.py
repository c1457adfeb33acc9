"""`convolve.optimizers.register`: offer an optimizer under a name.

An optimizer is a class of `torch.optim`, or a function of parameter groups that returns a `torch.optim.Optimizer`. It
is called with `lr` if it has such an argument. The schedule sets the learning rate of each group before every step.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from convolve import plugins

OptimizerT = TypeVar("OptimizerT", bound=Callable[..., Any])


def register(name: str) -> Callable[[OptimizerT], OptimizerT]:
    """Return a decorator for a function or class that becomes an optimizer by this name: `train(..., optimizer=name)`.

    On the command line: `--plugin FILE.py --optimizer name`.
    """
    return plugins.OPTIMIZERS.decorator(name)
