"""`convolve.metrics.register`: offer a metric under a name.

A metric is a function of outputs [N, classes] and labels [N] that returns one value per sample, whose mean is the
metric, or an object with `name`, `higher_is_better`, `update` and `compute`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from convolve import plugins

MetricT = TypeVar("MetricT", bound=Any)


def register(name: str) -> Callable[[MetricT], MetricT]:
    """Return a decorator for a function or object that becomes a metric by this name: `train(..., metrics=[name])`."""
    return plugins.METRICS.decorator(name)
