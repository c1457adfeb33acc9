"""Gradients summed over the micro batches of all replicas once per step, while the backward pass still runs.

The arithmetic: every replica has divided its losses by the number of samples of the global batch, so the sum over micro
batches and replicas is the mean over the global batch, even if replicas have different numbers of samples. Nothing is
divided here. All sums are those of one fixed tree over the micro batches of a step (`convolve.summation`), so they have
the same bits no matter which replica runs a micro batch:

    replica:    add the gradients of its micro batches as far as the tree allows: its nodes, mostly one
    replicas:   exchange nodes; each adds the nodes of all replicas to the root

Parameters are put into buckets in reverse order, which is about the order in which the backward pass finishes them. In
the last micro batch a bucket is sent as soon as all of its gradients are ready, while the rest is still being computed.
All replicas send buckets in the same order, even a replica without samples, which sends no node. The payload, a small
tensor of other sums that every step needs, is part of the last bucket: a separate message would cost more than it
carries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from convolve.distributed.collectives import Collectives
from convolve.distributed.node_exchange import Finish, ProcessGroupTransport
from convolve.distributed.node_sum import AddFn, SumLayout, plain_add
from convolve.distributed.positions import Positions
from convolve.distributed.shared_memory import open_shared_memory
from convolve.numerics.execution import Execution
from convolve.summation import Node, TreeSum

BUCKET_BYTES = 10 << 20
Gradients = list[Tensor | None]


class GradientSync(Protocol):
    """Turns the gradients of micro batches into sums over the micro batches of all replicas."""

    def start(self, leaves: range, count: int) -> None:
        """Start a step of `count` micro batches, of which this replica runs `leaves`."""

    def end_micro_batch(self, leaf: int) -> None:
        """Take the gradients of a micro batch that is not the last one of this replica."""

    def last_micro_batch(self, leaf: int) -> None:
        """Allow buckets to be sent. Call before the last backward pass of a step."""

    def finish(self, payload: list[Tensor]) -> Tensor:
        """Complete the sums of all gradients and return that of `payload`, which has a row for each node of this
        replica. It is valid until the next step."""


class NoSync:
    """A single replica with one micro batch: its gradients are the sums."""

    def start(self, leaves: range, count: int) -> None: ...

    def end_micro_batch(self, leaf: int) -> None: ...

    def last_micro_batch(self, leaf: int) -> None: ...

    def finish(self, payload: list[Tensor]) -> Tensor:
        return payload[0]


class GradientTree:
    """Sums of the gradients of the micro batches of this replica, as far as the tree of the step allows."""

    def __init__(self, model: nn.Module, layout: SumLayout, execution: Execution) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self.execution = execution
        self._layout = layout
        self.start(range(1), 1)

    def start(self, leaves: range, count: int) -> None:
        self.count = count
        self._leaves = leaves
        self._next = leaves.start
        self._last: int | None = None
        self._tree = self._open(self.names)

    def end_micro_batch(self, leaf: int) -> None:
        self._skip_to(leaf)
        self._tree.push(Node(leaf, 1), [parameter.grad for parameter in self.parameters])
        self._next = leaf + 1
        for parameter in self.parameters:
            parameter.grad = None

    def last_micro_batch(self, leaf: int) -> None:
        self._skip_to(leaf)
        self._last = leaf

    def _skip_to(self, leaf: int) -> None:
        """Add micro batches without a readable sample, which have no gradient."""
        for skipped in range(self._next, leaf):
            self._tree.push(Node(skipped, 1), [None] * len(self.parameters))
        self._next = leaf

    def nodes(self, part: slice) -> list[Gradients]:
        """Return the sums of some of the parameters, with those of the last micro batch: one list for each node."""
        tree, parameters = self._open(self.names[part]), self.parameters[part]
        for node, value in zip(self._tree.nodes, self._tree.values, strict=True):
            tree.push(node, value[part])
        for leaf in range(self._next, self._leaves.stop):
            last = leaf == self._last
            tree.push(Node(leaf, 1), [parameter.grad if last else None for parameter in parameters])
        return tree.values

    def _open(self, names: list[str]) -> TreeSum[Gradients]:
        return TreeSum(self.count, lambda left, right, first: self._add(names, left, right, first))

    def _add(self, names: list[str], left: Gradients, right: Gradients, first: int) -> Gradients:
        both = [(name, a, b) for name, a, b in zip(names, left, right, strict=True) if a is not None and b is not None]
        if both:
            present, totals, added = map(list, zip(*both, strict=True))
            self.add(present, totals, added, first)
        return [b if a is None else a for a, b in zip(left, right, strict=True)]

    def add(self, names: list[str], left: list[Tensor], right: list[Tensor], first: int) -> None:
        """Add gradients in place, to `left`; `first` is the first leaf of the right ones."""
        sample = self._layout.first_sample(first, self.count) if self.execution.rounds_sums else 0
        self.execution.add_gradients_(names, left, right, sample)


class LocalSum(GradientTree):
    """A single replica that accumulates gradients over micro batches."""

    def finish(self, payload: list[Tensor]) -> Tensor:
        for gradients in self.nodes(slice(None)):
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
        self.start(range(1), 1)
        return payload[0]


@dataclass
class Bucket:
    """Neighboring parameters whose gradients are sent together, followed by a payload.

    `flats` has a flat buffer for each node of this replica, and at least one; the sum is in the first one.
    """

    parameters: list[nn.Parameter]
    names: list[str] = field(default_factory=list)
    payload_size: int = 1
    part: slice = field(default_factory=lambda: slice(None))
    missing: int = 0
    finish: Finish | None = None
    flats: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(parameter.numel() for parameter in self.parameters) + self.payload_size
        self._layouts = [
            (parameter.shape, torch.empty_like(parameter, device="meta").stride()) for parameter in self.parameters
        ]
        self.flats = []
        self._views: list[list[Tensor]] = []
        self._reserve(1)

    @property
    def flat(self) -> Tensor:
        """The buffer of the sum."""
        return self.flats[0]

    @property
    def gradients(self) -> list[Tensor]:
        """The sums of gradients."""
        return self._views[0]

    @property
    def payload(self) -> Tensor:
        """The sum of the payload."""
        return self.flat[-self.payload_size :]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the gradients in a flat buffer, with the strides of the parameters, so nothing is rearranged."""
        pieces = flat[: -self.payload_size].split([parameter.numel() for parameter in self.parameters])  # type: ignore[no-untyped-call]
        return [piece.as_strided(*layout) for piece, layout in zip(pieces, self._layouts, strict=True)]

    def _reserve(self, count: int) -> None:
        first = self.parameters[0]
        while len(self.flats) < count:
            self.flats.append(torch.zeros(self.size, dtype=first.dtype, device=first.device))
            self._views.append(self.views(self.flats[-1]))

    def pack(self, nodes: list[Gradients], payload: list[Tensor]) -> list[Tensor]:
        """Copy gradients, and the payload if it belongs here, into flat buffers; a missing gradient is zero."""
        self._reserve(len(nodes))
        for flat, views, gradients in zip(self.flats, self._views, nodes, strict=False):
            present = [pair for pair in zip(views, gradients, strict=True) if pair[1] is not None]
            if len(present) < len(gradients):
                flat[: -self.payload_size].zero_()
            if present:
                torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])  # type: ignore[misc]
        for flat, row in zip(self.flats, payload, strict=False):
            flat[-self.payload_size :].copy_(row)
        return self.flats[: len(nodes)]

    def unpack(self) -> None:
        """Make the sums the gradients of the parameters, without copying. Parameters that are frozen now have none."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient if parameter.requires_grad else None


def fill_buckets(
    named: Sequence[tuple[str, nn.Parameter]], payload_size: int = 1, size: int = BUCKET_BYTES
) -> list[Bucket]:
    """Put parameters in reverse order into buckets of at most `size` bytes (or one parameter).

    The payload is part of the last one; the others have one spare element. `part` selects the parameters of a bucket.
    """
    backward = list(named)[::-1]
    groups = group_by_bytes([parameter.numel() * parameter.element_size() for _, parameter in backward], size)
    buckets = []
    for group in groups:
        names, parameters = zip(*(backward[index] for index in group), strict=True)
        buckets.append(
            Bucket(
                list(parameters),
                list(names),
                payload_size if group is groups[-1] else 1,
                slice(group[0], group[-1] + 1),
            )
        )
    return buckets


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


class Transport(Protocol):
    """Exchanges nodes between replicas."""

    def __call__(self, flats: list[Tensor], out: Tensor, nodes: list[list[Node]], add: AddFn) -> Finish:
        """Start to exchange the flat tensors of the nodes of this replica, given the nodes of all replicas. When the
        returned function returns, `out` is their sum; `add` adds two nodes."""


class BucketedSum(GradientTree):
    """Sums the gradients of a model over replicas, bucket by bucket; the last bucket is sent by `finish`."""

    def __init__(
        self,
        model: nn.Module,
        layout: SumLayout,
        execution: Execution,
        transport: Callable[[int], Transport],
        payload_size: int = 1,
        positions: Positions | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(model, layout, execution)
        self.buckets = fill_buckets(list(zip(self.names, self.parameters, strict=True)), payload_size, bucket_bytes)
        self.names, self.parameters = self.names[::-1], self.parameters[::-1]
        self._transport = transport(max(bucket.size for bucket in self.buckets))
        self._positions = positions or Positions()
        self._sent = 0
        self._may_send = False
        self._payload: list[Tensor] = []
        self._bucket_of = {parameter: bucket for bucket in self.buckets[:-1] for parameter in bucket.parameters}
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def last_micro_batch(self, leaf: int) -> None:
        super().last_micro_batch(leaf)
        # Inside of the backward pass an emulated execution would round these sums a second time.
        self._may_send = not self.execution.rounds_sums
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._may_send:
            return
        assert isinstance(parameter, nn.Parameter), "hooks are registered on parameters"
        self._bucket_of[parameter].missing -= 1
        while self._sent < len(self.buckets) - 1 and self.buckets[self._sent].missing == 0:
            self._send([])

    def _send(self, payload: list[Tensor]) -> None:
        bucket = self.buckets[self._sent]
        flats = bucket.pack(self.nodes(bucket.part), payload)
        add = self._rounded_add(bucket) if self.execution.rounds_sums else plain_add
        bucket.finish = self._transport(flats, bucket.flat, self._layout.nodes(self.count), add)
        self._sent += 1

    def _rounded_add(self, bucket: Bucket) -> AddFn:
        def add(left: Tensor, right: Tensor, first: int) -> Tensor:
            left = left.clone()
            self.add(bucket.names, bucket.views(left), bucket.views(right), first)
            left[-bucket.payload_size :] += right[-bucket.payload_size :]
            return left

        return add

    def finish(self, payload: list[Tensor]) -> Tensor:
        with self._positions.during("gradient sum"):
            while self._sent < len(self.buckets):
                self._send(payload if self._sent == len(self.buckets) - 1 else [])
            for bucket in self.buckets:
                assert bucket.finish is not None, "every bucket was sent"
                bucket.finish()
                bucket.unpack()
        self._sent, self._may_send = 0, False
        self.start(range(1), 1)
        return self.buckets[-1].payload


def build(
    collectives: Collectives, model: nn.Module, payload_size: int, layout: SumLayout, execution: Execution
) -> GradientSync:
    """Return the gradient sync of a model: through shared memory if possible, else by the backend of its device."""
    if layout.replicas == 1:
        return NoSync() if layout.accumulation == 1 else LocalSum(model, layout, execution)
    on_cpu = next(model.parameters()).device.type == "cpu"

    def open_transport(capacity: int) -> Transport:
        shared = open_shared_memory(collectives, capacity, layout.most_nodes) if on_cpu else None
        if shared is not None:
            return shared
        assert collectives.replica_group is not None, "replicas have a process group"
        return ProcessGroupTransport(collectives.replica_group)

    # Every node needs a slot of shared memory, so buckets are smaller if replicas can have several.
    bucket_bytes = BUCKET_BYTES // layout.most_nodes
    return BucketedSum(model, layout, execution, open_transport, payload_size, collectives.positions, bucket_bytes)
