"""Collectives between threads of one process: the contract of `Collectives` without process groups."""

import threading

from convolve.distributed.positions import Positions
from convolve.distributed.topology import Topology

TIMEOUT = 60


class _Exchange:
    """Exchanges one value per rank among all ranks, any number of times."""

    def __init__(self, world):
        self._barrier = threading.Barrier(world)
        self._values = [None] * world

    def __call__(self, rank, value):
        self._values[rank] = value
        self._barrier.wait(TIMEOUT)
        values = list(self._values)
        self._barrier.wait(TIMEOUT)
        return values


class ThreadCollectives:
    """Represent one rank; all ranks of a run use one exchange."""

    replica_group = None
    stage_group = None

    def __init__(self, topology, exchange):
        self.topology = topology
        self._exchange = exchange
        self.positions = Positions()

    @property
    def is_rank_zero(self):
        return self.topology.rank == 0

    def any_rank(self, flag):
        return any(self._exchange(self.topology.rank, flag))

    def broadcast_str(self, text):
        return self._exchange(self.topology.rank, text)[0]

    def exchange(self, text):
        return self._exchange(self.topology.rank, text)

    def sum_over_replicas(self, values):
        parts = self._exchange(self.topology.rank, values)
        return sum(parts[rank] for rank in self.topology.same_stage(self.topology.stage))

    def sum_over_stages(self, values):
        parts = self._exchange(self.topology.rank, values)
        return sum(parts[rank] for rank in self.topology.same_replica(self.topology.replica))


def run_ranks(function, replicas=2, stages=1):
    """Call `function(collectives)` on every rank, each in a thread; return its results or exceptions by rank."""
    world = replicas * stages
    exchange, results = _Exchange(world), [None] * world

    def run(rank):
        try:
            results[rank] = function(ThreadCollectives(Topology(replicas, stages, rank), exchange))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    return results
