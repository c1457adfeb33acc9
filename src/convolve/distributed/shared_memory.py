"""Sums over the processes of one host through shared memory.

For a small model a message through a socket takes longer than the computation. Here every process has a slot in a
mapped file for each node of the summation tree that it can have. It writes its nodes and increments its round number.
When all processes have reached the round, each of them adds all nodes in the tree, so all processes have the same bits.
Two sets of slots alternate, so a fast process cannot overwrite what a slow one still reads.

    process r, round t:  slots[t % 2][r] := nodes;  rounds[r] := t
                         wait until all rounds >= t
                         sum := tree over slots[t % 2][0], ..., slots[t % 2][n - 1]

A round starts only after the previous one is finished, so no process is ever two rounds ahead: it would have waited for
the others in between.
"""

import mmap
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from convolve.distributed.collectives import Collectives, CollectiveTimeout
from convolve.distributed.node_sum import AddFn, is_plain_pair, sum_nodes
from convolve.distributed.rendezvous import TIMEOUT
from convolve.errors import ParallelError
from convolve.summation import Node

SPINS = 2000
MAX_BYTES = 64 << 20


class SharedMemoryAllReduce:
    """Sums flat float32 tensors over two or more processes of one host.

    `shape` is the number of tensors of a process and of their elements, at most.
    """

    def __init__(self, path: Path, rank: int, world: int, shape: tuple[int, int]) -> None:
        self._rank, self._world, self._round = rank, world, 0
        self._finish: Callable[[], None] = _noop
        head, slots = 64 * world, 2 * world * shape[0] * shape[1] * 4
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), head + slots)
        # One cache line for each process: its round number and its process id.
        lines = np.frombuffer(memory, np.int64, 8 * world)
        self._rounds, self._pids = lines[::8], lines[1::8]
        self._pids[rank] = os.getpid()
        values = np.frombuffer(memory, np.float32, slots // 4, head)
        self._slots = values.reshape(2, world, *shape)

    @staticmethod
    def create(path: Path, world: int, shape: tuple[int, int]) -> None:
        """Create the file. One process calls this before the others open it. Raises OSError without enough memory."""
        # Written, not truncated: memory that does not exist would end the processes with SIGBUS when they use it.
        path.write_bytes(bytes(64 * world + 2 * world * shape[0] * shape[1] * 4))

    def __call__(self, flats: list[Tensor], out: Tensor, nodes: list[list[Node]], add: AddFn) -> Callable[[], None]:
        """Start to sum the nodes of all processes. The returned function waits for the sum, which is then in `out`, and
        so does the next call."""
        self._finish()
        self._round += 1
        number = self._round
        # numpy: its calls cost a fraction of torch's, which matters for a small model.
        slots = self._slots[number % 2, :, :, : out.numel()]
        for slot, flat in zip(slots[self._rank], flats, strict=False):
            slot[:] = flat.numpy()
        self._rounds[self._rank] = number

        def finish() -> None:
            if self._finish is not finish:
                return  # finished by a later call
            self._finish = _noop
            self._wait(number)
            if is_plain_pair(nodes, add):
                np.add(slots[0, 0], slots[1, 0], out=out.numpy())
                return
            values = [[torch.from_numpy(slot) for slot in replica] for replica in slots]
            out.copy_(sum_nodes(values, nodes, add))

        self._finish = finish
        return finish

    def _wait(self, number: int) -> None:
        deadline = time.perf_counter() + TIMEOUT.total_seconds()
        spins = 0
        while int(self._rounds.min()) < number:
            spins += 1
            if spins > SPINS:
                time.sleep(5e-5)
                self._require_alive(number)
                if time.perf_counter() > deadline:
                    raise CollectiveTimeout

    def _require_alive(self, number: int) -> None:
        """Stop immediately if a process that has not reached the round has exited."""
        for rank in np.flatnonzero(self._rounds < number).tolist():
            try:
                os.kill(int(self._pids[rank]), 0)
            except ProcessLookupError:
                raise ParallelError(f"rank {rank} exited; resume with `convolve restore`") from None


def open_shared_memory(collectives: Collectives, capacity: int, most_nodes: int) -> SharedMemoryAllReduce | None:
    """Return a sum over replicas of up to `most_nodes` tensors of `capacity` elements for each.

    None if replicas are on several hosts or in containers that do not share memory, or the tensors are too large. Each
    stage has its file. Rank 0 creates their folder; both are deleted as soon as all processes have opened them.
    """
    topology = collectives.topology
    host = _name_host()
    other_host = collectives.broadcast_str(host) != host
    if collectives.any_rank(other_host or 8 * capacity * most_nodes * topology.replicas > MAX_BYTES):
        return None
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    created = tempfile.mkdtemp(prefix="convolve-", dir=parent) if collectives.is_rank_zero else ""
    folder = Path(collectives.broadcast_str(created))
    path, shape = folder / f"stage-{topology.stage}", (most_nodes, capacity)
    try:
        full = topology.replica == 0 and not _create(path, topology.replicas, shape)
        if collectives.any_rank(full) or collectives.any_rank(not path.is_file()):
            return None
        shared = SharedMemoryAllReduce(path, topology.replica, topology.replicas, shape)
        _barrier(collectives)
        return shared
    finally:
        if collectives.is_rank_zero:
            shutil.rmtree(folder, ignore_errors=True)


def _name_host() -> str:
    """Return the name of this host and of its process ids: containers may have only one of them in common."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {space.stat().st_ino if space.exists() else ''}"


def _create(path: Path, world: int, shape: tuple[int, int]) -> bool:
    """Create a file and return whether it could be created; /dev/shm may be small, or that of another container."""
    try:
        SharedMemoryAllReduce.create(path, world, shape)
    except OSError:
        return False
    return True


def _barrier(collectives: Collectives) -> None:
    collectives.any_rank(False)  # returns after all ranks have called it


def _noop() -> None:
    """Finish nothing: no round has started."""
