"""What every step asks of the other processes: gradients that are sums over replicas, and when to stop.

How the sums are made is in `buckets.py`.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn


class Synchroniser(Protocol):
    """Makes gradients the sum over replicas; a wish to stop travels with them, so all end at the same step.

    So does a small tensor of other sums that every step needs.
    """

    stop_agreed: bool

    def ask_to_stop(self, wanted: bool) -> None:
        """Say before a step whether this process wants it to be the last."""

    def arm(self) -> None:
        """Buckets may be sent from now on."""

    def __call__(self, model: nn.Module, extra: Tensor) -> Tensor:
        """Finish the sum of the gradients, and return that of the other tensor; it is good until the next step."""


class NoSynchroniser:
    """A single replica agrees with itself."""

    stop_agreed = False

    def ask_to_stop(self, wanted: bool) -> None:
        """The own wish is the answer."""
        self.stop_agreed = wanted

    def arm(self) -> None:
        """Nothing is sent."""

    def __call__(self, model: nn.Module, extra: Tensor) -> Tensor:
        """Nothing is missing."""
        return extra


class AgreedStop:
    """Stages have no gradients in common; the wish to stop is told to all processes for itself."""

    def __init__(self, inner: Synchroniser, agree: Callable[[bool], bool]) -> None:
        self._inner = inner
        self._agree = agree
        self.stop_agreed = False

    def ask_to_stop(self, wanted: bool) -> None:
        """Say before a step whether this process wants it to be the last."""
        self._inner.ask_to_stop(wanted)

    def arm(self) -> None:
        """Buckets may be sent from now on."""
        self._inner.arm()

    def __call__(self, model: nn.Module, extra: Tensor) -> Tensor:
        """Finish the sums, and find out whether anybody wants to stop."""
        total = self._inner(model, extra)
        self.stop_agreed = self._agree(self._inner.stop_agreed)
        return total
