"""The decision of all processes to stop after the same step.

On CPUs the flag travels with the gradients. On an accelerator reading it there would make the host wait for the step,
so the hosts exchange it through gloo while the device computes, and read it one step later.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from convolve.distributed.collectives import Collectives


class StopVotes(Protocol):
    """Decides after each step whether any process asked to stop. All processes decide alike."""

    def decide(self, stop: bool, votes: Tensor) -> bool:
        """Return whether to stop after this step, given the flag of this process and those summed over replicas."""


class OwnVote:
    """A single process decides alone."""

    def decide(self, stop: bool, votes: Tensor) -> bool:
        return stop


class SummedVotes:
    """Reads the sum of this step, which is on the host."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def decide(self, stop: bool, votes: Tensor) -> bool:
        return bool(self._collectives.sum_over_stages(votes) > 0)


class LateVotes:
    """Reads the flags of the previous step, exchanged between hosts in the meantime."""

    def __init__(self) -> None:
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._pending: dist.Work | None = None

    def decide(self, stop: bool, votes: Tensor) -> bool:
        if self._pending is not None:
            self._pending.wait()
        stopped = bool(self._flag)
        self._flag.fill_(stop)
        self._pending = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)
        return stopped


def build(collectives: Collectives, device: torch.device) -> StopVotes:
    """Return how the processes of a run agree to stop."""
    if collectives.topology.world == 1:
        return OwnVote()
    return SummedVotes(collectives) if device.type == "cpu" else LateVotes()
