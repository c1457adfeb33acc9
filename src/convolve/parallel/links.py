"""What it costs to send: a stated model of the network between processes.

    message             latency + bytes / bandwidth
    sum over N, ring    2 (N - 1) messages of bytes / N each, one after the other, on every link:
                        2 (N - 1) latency + 2 (N - 1) / N bytes / bandwidth

The gradients of a stage are ready block by block, last block first, while its last backward pass runs; what is ready is
sent in that order, one after the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Latency in seconds and bandwidth in bytes per second, in each direction."""

    latency: float
    bandwidth: float

    def message(self, size: float) -> float:
        """Seconds of one message."""
        return self.latency + size / self.bandwidth

    def ring(self, size: float, members: int) -> float:
        """Seconds to add up `size` bytes over the members of a ring."""
        return 2 * (members - 1) * self.message(size / members)


# Processes of one host share its memory; hosts are taken to have ten-gigabit Ethernet unless told otherwise.
MEMORY = Link(20e-6, 4e9)
ETHERNET = Link(50e-6, 1.25e9)


def ring_bytes(size: float, members: int) -> float:
    """What each member of a ring sends to add up `size` bytes."""
    return 2 * (members - 1) / members * size


def finish_sums(ready: Iterable[tuple[float, float]], link: Link, members: int) -> float:
    """When the last of several sums is there, given when each is ready and its bytes, in the order of sending."""
    clock = 0.0
    for moment, size in ready:
        clock = max(clock, moment) + (link.ring(size, members) if members > 1 else 0.0)
    return clock
