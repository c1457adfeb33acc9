"""What every step asks of the other processes: gradients that are sums over replicas, and when to stop.

How the sums are made is in `buckets.py`.

Gradients of all replicas, added up once per step, while the backward pass still runs.

The arithmetic: every replica has divided its losses by the number of samples of the whole window, so the sum over
replicas is the mean over the window, whatever the shares were; nothing is divided here.

Parameters are put into buckets in the reverse of their order, which is about the order in which the backward pass
finishes them. In the last micro batch a bucket whose gradients are all there is sent off while the rest is still being
computed. All replicas send buckets in the same order, also one whose share of a short window is empty and that has
nothing but zeros. What else is added up over replicas in each step goes with the last bucket: a message of its own
would cost more than it carries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn


class GradientSync(Protocol):
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


class NoSync:
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


class StopVote:
    """Stages have no gradients in common; the wish to stop is told to all processes for itself."""

    def __init__(self, inner: GradientSync, agree: Callable[[bool], bool]) -> None:
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


BUCKET_BYTES = 10 << 20
Finish = Callable[[], None]
Reduce = Callable[[Tensor], Finish]
"""Starts to add a flat tensor up over the replicas, in place; the result is there after the returned call."""


@dataclass
class Bucket:
    """Neighboring parameters whose gradients travel together, and `more` elements; the last of them is a wish to stop.

    `parts` are views of the flat buffer that lie in memory as the parameters do, so that nothing is rearranged.
    """

    parameters: list[nn.Parameter]
    more: int = 1
    missing: int = 0
    finish: Finish | None = None
    flat: Tensor = field(init=False)
    parts: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = torch.zeros(sum(sizes) + self.more, dtype=self.parameters[0].dtype)
        pieces = self.flat[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
        self.parts = [
            piece.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
            for piece, parameter in zip(pieces, self.parameters, strict=True)
        ]

    @property
    def extra(self) -> Tensor:
        """The elements between the gradients and the wish to stop."""
        return self.flat[-self.more : -1]

    def pack(self) -> None:
        """Copy the gradients into the flat buffer; a parameter without one adds zero."""
        gradients = [parameter.grad for parameter in self.parameters]
        present = [(part, one) for part, one in zip(self.parts, gradients, strict=True) if one is not None]
        if len(present) < len(gradients):
            self.flat[: -self.more].zero_()
        if present:
            torch._foreach_copy_([part for part, _ in present], [one for _, one in present])

    def unpack(self) -> None:
        """Show the sums to the optimizer, where they are."""
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            parameter.grad = part


def fill_buckets(parameters: list[nn.Parameter], extra: int = 0, size: int = BUCKET_BYTES) -> list[Bucket]:
    """Parameters in reverse order, in buckets of at most `size` bytes (or one parameter); `extra` elements go last."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        need = parameter.numel() * parameter.element_size()
        if not groups or need > room:
            groups.append([])
            room = size
        groups[-1].append(parameter)
        room -= need
    return [Bucket(group, 1 + (extra if group is groups[-1] else 0)) for group in groups]


@dataclass
class BucketedAllReduce:
    """Adds up the gradients of a model over replicas.

    `arm` is called before the last micro batch of a window: from then on finished buckets are sent off. Calling the
    object sends what is left, the last bucket always, and waits for all of it.
    """

    buckets: list[Bucket]
    reduce: Reduce
    stop_agreed: bool = False
    _stop_wanted: bool = False
    _sent: int = 0
    _armed: bool = False
    _owner: dict[nn.Parameter, Bucket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for bucket in self.buckets[:-1]:
            for parameter in bucket.parameters:
                self._owner[parameter] = bucket
                parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]

    def ask_to_stop(self, wanted: bool) -> None:
        """Say whether this process wants the next step to be the last; `stop_agreed` then holds the common answer."""
        self._stop_wanted = wanted

    def arm(self) -> None:
        """The next backward pass is the last one of the window."""
        self._armed = True
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _arrive(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        assert isinstance(parameter, nn.Parameter), "gradients arrive at parameters"
        self._owner[parameter].missing -= 1
        while self._sent < len(self.buckets) - 1 and self.buckets[self._sent].missing == 0:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[self._sent]
        bucket.pack()
        bucket.flat.numpy()[-1] = self._stop_wanted
        bucket.finish = self.reduce(bucket.flat)
        self._sent += 1

    def __call__(self, model: nn.Module, extra: Tensor) -> Tensor:
        """Make every parameter's gradient the sum over the replicas; returns the sum of what else there is."""
        last = self.buckets[-1]
        last.extra.copy_(extra)
        while self._sent < len(self.buckets):
            self._send()
        for bucket in self.buckets:
            assert bucket.finish is not None, "every bucket was sent"
            bucket.finish()
            bucket.unpack()
        self.stop_agreed = bool(self.buckets[0].flat.numpy()[-1] > 0)
        self._sent, self._armed = 0, False
        return last.extra
