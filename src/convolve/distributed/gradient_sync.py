"""Gradients summed over replicas once per step, while the backward pass still runs.

The arithmetic: every replica has divided its losses by the number of samples of the global batch, so the sum over
replicas is the mean over the global batch, even if replicas have different numbers of samples. Nothing is divided here.

Parameters are put into buckets in reverse order, which is about the order in which the backward pass finishes them. In
the last micro batch a bucket is sent as soon as all of its gradients are ready, while the rest is still being computed.
All replicas send buckets in the same order, even a replica without samples, which sends zeros. The payload, a small
tensor of other sums that every step needs, is part of the last bucket: a separate message would cost more than it
carries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from convolve.distributed.collectives import Collectives
from convolve.distributed.positions import Positions
from convolve.distributed.shared_memory import open_shared_memory

BUCKET_BYTES = 10 << 20
Finish = Callable[[], None]
Reduce = Callable[[Tensor], Finish]
"""Starts to sum a flat tensor over the replicas, in place. The sum is complete when the returned function returns."""


class GradientSync(Protocol):
    """Turns the gradients of a replica into sums over all replicas."""

    def last_micro_batch(self) -> None:
        """Allow buckets to be sent. Call before the last backward pass of a step."""

    def finish(self, payload: Tensor) -> Tensor:
        """Complete the sums of all gradients and return the sum of `payload`, which is valid until the next step."""


class NoSync:
    """A single replica: its gradients are the sums."""

    def last_micro_batch(self) -> None: ...

    def finish(self, payload: Tensor) -> Tensor:
        return payload


@dataclass
class Bucket:
    """Neighboring parameters whose gradients are sent together, followed by a payload.

    `gradients` are views of the flat buffer with the strides of the parameters, so nothing is rearranged.
    """

    parameters: list[nn.Parameter]
    payload_size: int = 1
    missing: int = 0
    finish: Finish | None = None
    flat: Tensor = field(init=False)
    gradients: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        first = self.parameters[0]
        self.flat = torch.zeros(sum(sizes) + self.payload_size, dtype=first.dtype, device=first.device)
        pieces = self.flat[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
        self.gradients = [
            piece.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
            for piece, parameter in zip(pieces, self.parameters, strict=True)
        ]

    @property
    def payload(self) -> Tensor:
        """The elements after the gradients."""
        return self.flat[-self.payload_size :]

    def pack(self) -> None:
        """Copy the gradients into the flat buffer; a parameter without one adds zero."""
        pairs = zip(self.gradients, self.parameters, strict=True)
        present = [(view, parameter.grad) for view, parameter in pairs if parameter.grad is not None]
        if len(present) < len(self.parameters):
            self.flat[: -self.payload_size].zero_()
        if present:
            torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])

    def unpack(self) -> None:
        """Make the sums the gradients of the parameters, without copying."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient


def fill_buckets(parameters: list[nn.Parameter], payload_size: int = 1, size: int = BUCKET_BYTES) -> list[Bucket]:
    """Put parameters in reverse order into buckets of at most `size` bytes (or one parameter).

    Only the last payload is used. The other buckets have one spare element, because the order of the sums in gloo, and
    with three or more replicas their last bits, depend on the length of a tensor: these are the lengths of version 0.1.
    """
    parameters = parameters[::-1]
    groups = group_by_bytes([parameter.numel() * parameter.element_size() for parameter in parameters], size)
    return [
        Bucket([parameters[index] for index in group], payload_size if group is groups[-1] else 1) for group in groups
    ]


def group_by_bytes(sizes: Sequence[int], limit: int = BUCKET_BYTES) -> list[list[int]]:
    """Return groups of neighboring indices whose sizes sum to at most `limit`; a larger size is a group."""
    groups: list[list[int]] = []
    free = 0
    for index, size in enumerate(sizes):
        if not groups or size > free:
            groups.append([])
            free = limit
        groups[-1].append(index)
        free -= size
    return groups


@dataclass
class BucketedAllReduce:
    """Sums the gradients of a model over replicas, bucket by bucket; the last bucket is sent by `finish`."""

    buckets: list[Bucket]
    reduce: Reduce
    positions: Positions = field(default_factory=Positions)
    _sent: int = 0
    _may_send: bool = False
    _bucket_of: dict[nn.Parameter, Bucket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for bucket in self.buckets[:-1]:
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def last_micro_batch(self) -> None:
        self._may_send = True
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._may_send:
            return
        assert isinstance(parameter, nn.Parameter), "hooks are registered on parameters"
        self._bucket_of[parameter].missing -= 1
        while self._sent < len(self.buckets) - 1 and self.buckets[self._sent].missing == 0:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[self._sent]
        bucket.pack()
        bucket.finish = self.reduce(bucket.flat)
        self._sent += 1

    def finish(self, payload: Tensor) -> Tensor:
        last = self.buckets[-1]
        last.payload.copy_(payload)
        with self.positions.during("gradient sum"):
            while self._sent < len(self.buckets):
                self._send()
            for bucket in self.buckets:
                assert bucket.finish is not None, "every bucket was sent"
                bucket.finish()
                bucket.unpack()
        self._sent, self._may_send = 0, False
        return last.payload


def build(collectives: Collectives, model: nn.Module, payload_size: int) -> GradientSync:
    """Return the gradient sync of a model: through shared memory if possible, else by the backend of its device."""
    if collectives.topology.replicas == 1:
        return NoSync()
    buckets = fill_buckets([parameter for parameter in model.parameters() if parameter.requires_grad], payload_size)

    def all_reduce(flat: Tensor) -> Finish:
        work = dist.all_reduce(flat, group=collectives.replica_group, async_op=True)
        assert work is not None, "an asynchronous operation has a handle"

        def finish() -> None:
            work.wait()

        return finish

    largest = max(bucket.flat.numel() for bucket in buckets)
    shared = open_shared_memory(collectives, largest) if buckets[0].flat.device.type == "cpu" else None
    return BucketedAllReduce(buckets, shared or all_reduce, collectives.positions)
