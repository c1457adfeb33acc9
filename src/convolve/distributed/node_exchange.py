"""Exchange of the nodes of a bucket through torch.distributed, by the backend of their device."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from convolve.distributed.node_sum import AddFn, is_plain_pair, plain_add, sum_nodes
from convolve.summation import Node

Finish = Callable[[], None]


def fraction_size(size: int, members: int) -> int:
    """Return the elements of a bucket that each of the replicas sums."""
    return -(-size // members)


class ProcessGroupTransport:
    """Exchanges nodes through a process group, by the backend of their device."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, flats: list[Tensor], out: Tensor, nodes: list[list[Node]], add: AddFn) -> Finish:
        if is_plain_pair(nodes, add):
            return self._add_pair(out)
        # Rounding depends on the position in the bucket, so it needs whole buckets.
        return self._exchange(flats, out, nodes) if add is plain_add else self._gather(flats, out, nodes, add)

    def _add_pair(self, flat: Tensor) -> Finish:
        """A single addition has no order."""
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None, "an asynchronous operation has a handle"

        def finish() -> None:
            work.wait()

        return finish

    def _exchange(self, flats: list[Tensor], out: Tensor, nodes: list[list[Node]]) -> Finish:
        """Each replica adds the nodes of all replicas for its fraction of the bucket, then all gather the sums.

        Every replica sends as much as in a ring, if it has one node.
        """
        members, most = len(nodes), max(map(len, nodes))
        part = fraction_size(out.numel(), members)
        padded = out.new_zeros(most, members * part)
        for row, flat in zip(padded, flats, strict=False):
            row[: flat.numel()].copy_(flat)
        sent = padded.view(most, members, part).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        assert work is not None, "an asynchronous operation has a handle"

        def finish() -> None:
            work.wait()
            total = sum_nodes([list(replica.unbind()) for replica in received.unbind()], nodes, plain_add)
            sums = out.new_empty(members, part)
            dist.all_gather(list(sums.unbind()), total.contiguous(), group=self._group)
            out.copy_(sums.view(-1)[: out.numel()])

        return finish

    def _gather(self, flats: list[Tensor], out: Tensor, nodes: list[list[Node]], add: AddFn) -> Finish:
        most = max(map(len, nodes))
        own = torch.stack([*flats, *[out] * (most - len(flats))])
        gathered = torch.empty(len(nodes), *own.shape, dtype=own.dtype, device=own.device)
        work = dist.all_gather(list(gathered.unbind()), own, group=self._group, async_op=True)
        assert work is not None, "an asynchronous operation has a handle"

        def finish() -> None:
            work.wait()
            out.copy_(sum_nodes([list(replica.unbind()) for replica in gathered.unbind()], nodes, add))

        return finish
