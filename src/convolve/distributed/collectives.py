"""Communication between the processes of a run, and checks that they all run the same thing.

`Collectives` has the few operations that the rest of convolve needs. A single process has them too (`SingleProcess`),
so no other code depends on the number of processes. Every rank must make the same calls in the same order.

Sums are added in the order of ranks, so a single process that adds the same parts gets the same bits.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load as unpack_tensors
from safetensors.torch import save as pack_tensors
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from convolve import __version__
from convolve.config import Config, ParallelConfig
from convolve.device import explain_failure, use
from convolve.distributed.positions import Positions, PublishedPositions
from convolve.distributed.rendezvous import TIMEOUT, process_group
from convolve.distributed.topology import Topology, find_topology
from convolve.errors import ParallelError
from convolve.loggers.base import Console, SilentConsole

CPU = torch.device("cpu")
# Options that may differ between hosts.
HOST_OPTIONS = ("data_dir", "threads", "workers", "device")


class CollectiveTimeout(RuntimeError):
    """Other ranks did not take part in a collective in time."""


class Collectives(Protocol):
    """Collective operations of the processes of a run.

    `replica_group` joins the ranks that hold the same stage, `stage_group` the stages of this replica. They are None
    in a single process.
    """

    topology: Topology

    @property
    def positions(self) -> Positions:
        """Where this rank is, and where the others were last seen."""

    @property
    def replica_group(self) -> dist.ProcessGroup | None: ...

    @property
    def stage_group(self) -> dist.ProcessGroup | None: ...

    @property
    def is_rank_zero(self) -> bool:
        """True in the process that logs and saves."""

    def any_rank(self, flag: bool) -> bool:
        """Return True on all ranks if `flag` is set on any of them."""

    def broadcast_str(self, text: str) -> str:
        """Broadcast a string from rank 0 to all ranks; `text` is ignored on the others."""

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """Return the sum of a small tensor over replicas, on all of them."""

    def sum_over_stages(self, values: Tensor) -> Tensor:
        """Return the sum of a small tensor over the stages of this replica, on all of them."""

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks in their order, on all of them."""

    def open_channel(self) -> Callable[[str], list[str]]:
        """Return `exchange` for a background thread, through connections that nothing else uses."""

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return, on rank 0, the tensors of all stages of its replica."""


class SingleProcess:
    """A run in one process."""

    topology = Topology()
    replica_group = None
    stage_group = None
    is_rank_zero = True

    def __init__(self) -> None:
        self.positions = Positions()

    def any_rank(self, flag: bool) -> bool:
        return flag

    def broadcast_str(self, text: str) -> str:
        return text

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        return values

    def sum_over_stages(self, values: Tensor) -> Tensor:
        return values

    def exchange(self, text: str) -> list[str]:
        return [text]

    def open_channel(self) -> Callable[[str], list[str]]:
        return self.exchange

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)


class DistributedCollectives:
    """Collectives of torch.distributed, in its default process group and the two groups given."""

    def __init__(
        self,
        topology: Topology,
        replica_group: dist.ProcessGroup,
        stage_group: dist.ProcessGroup,
        positions: PublishedPositions,
    ) -> None:
        self.topology = topology
        self.replica_group = replica_group
        self.stage_group = stage_group
        self.positions = positions

    @property
    def is_rank_zero(self) -> bool:
        return self.topology.rank == 0

    def any_rank(self, flag: bool) -> bool:
        flags = torch.tensor([int(flag)])
        with self.positions.during("agreement of all ranks"):
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item())

    def broadcast_str(self, text: str) -> str:
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        with self.positions.during("message of rank 0"):
            dist.broadcast(size, 0)
            if not self.is_rank_zero:
                data = torch.empty(int(size), dtype=torch.uint8)
            if len(data):
                dist.broadcast(data, 0)
        return data.numpy().tobytes().decode()

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        with self.positions.during("sum over replicas"):
            return ordered_sum(values, self.replica_group)

    def sum_over_stages(self, values: Tensor) -> Tensor:
        with self.positions.during("sum over stages"):
            return ordered_sum(values, self.stage_group)

    def exchange(self, text: str) -> list[str]:
        with self.positions.during("exchange of messages"):
            return _exchange(text, dist.group.WORLD)

    def open_channel(self) -> Callable[[str], list[str]]:
        group = new_group([list(range(self.topology.world))], self.topology.rank)
        return lambda text: _exchange(text, group)

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send the tensors to rank 0 as safetensors, one rank after the other."""
        with self.positions.during("weights of all stages"):
            return self._collect(tensors)

    def _collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        collected = dict(tensors)
        for rank in range(1, self.topology.stages):
            if self.topology.rank == rank:
                packed = pack_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
                data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
                dist.send(torch.tensor([len(data)]), 0)
                dist.send(data, 0)
            elif self.is_rank_zero:
                size = torch.zeros(1, dtype=torch.int64)
                dist.recv(size, rank)
                data = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(data, rank)
                collected.update(unpack_tensors(data.numpy().tobytes()))
        return collected


@contextmanager
def open_collectives(config: ParallelConfig, device: torch.device = CPU) -> Iterator[Collectives]:
    """Join the processes of a run, each with a device, and leave them at the end of the block.

    A device that fails inside the block is an error of one line.
    """
    topology = find_topology(config)
    use(device)
    try:
        if topology.world == 1:
            yield SingleProcess()
        else:
            with _joined(topology, device) as collectives:
                yield collectives
    except RuntimeError as error:
        explained = explain_failure(error, device)
        if explained is None:
            raise
        raise explained from error


@contextmanager
def _joined(topology: Topology, device: torch.device) -> Iterator["DistributedCollectives"]:
    with process_group(topology, device):
        collectives = _join(topology)
        try:
            yield collectives
        except RuntimeError as error:
            if not _is_connection_error(error):
                raise
            raise _explain(error, collectives) from error
        finally:
            collectives.positions.close()


def _explain(error: RuntimeError, collectives: DistributedCollectives) -> ParallelError:
    """Return the error of a lost connection; after a timeout, with the last position of every rank."""
    rank, positions = collectives.topology.rank, collectives.positions
    if not _is_timeout(error):
        problem = f"lost the connection ({_first_sentence(error)}); resume with `convolve restore`"
        return ParallelError(f"rank {rank}: {problem}")
    return ParallelError(
        f"rank {rank}: no response for {TIMEOUT.total_seconds():g} s at {positions}; {positions.describe_others()}; "
        "resume with `convolve restore`, or set CONVOLVE_TIMEOUT to more seconds"
    )


def _is_timeout(error: RuntimeError) -> bool:
    return isinstance(error, CollectiveTimeout) or "timed out" in str(error).lower()


def _join(topology: Topology) -> DistributedCollectives:
    replicas = new_group([topology.same_stage(stage) for stage in range(topology.stages)], topology.rank)
    stages = new_group([topology.same_replica(replica) for replica in range(topology.replicas)], topology.rank)
    positions = PublishedPositions(_get_default_store(), topology.rank, topology.world)
    positions.start()
    return DistributedCollectives(topology, replicas, stages, positions)


def new_group(members: list[list[int]], rank: int) -> dist.ProcessGroup:
    """Create all groups, as every rank must in the same order, and return the one with this rank."""
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in members]
    return next(group for ranks, group in zip(members, groups, strict=True) if rank in ranks)


def ordered_sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over a group, added in the order of its ranks."""
    parts = [torch.empty_like(values) for _ in range(group.size())]
    if len(parts) == 1:
        return values
    dist.all_gather(parts, values.contiguous(), group=group)
    for part in parts[1:]:
        parts[0] += part
    return parts[0]


def _exchange(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Return the texts of the ranks of a group, in their order."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = int(max(sizes))
    if not longest:
        return [""] * len(sizes)
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(padded, torch.nn.functional.pad(data, (0, longest - len(data))), group=group)
    return [part[: int(size)].numpy().tobytes().decode() for part, size in zip(padded, sizes, strict=True)]


def _is_connection_error(error: RuntimeError) -> bool:
    """Return whether gloo, which has no error class, reports a lost process or connection."""
    words = ("gloo", "Connection closed", "Connection reset")
    return _is_timeout(error) or any(word in str(error) for word in words)


def _first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of an error message of gloo, without the location in its source."""
    return re.sub(r"^\[[^]]*\] *", "", str(error).strip()).splitlines()[0].partition(". ")[0]


def require_same_start(collectives: Collectives, config: Config) -> None:
    """Stop all processes if one has other versions or another config than rank 0."""
    versions = f"convolve {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    require_equal(collectives, versions, "versions of convolve, torch or Python")
    values = {name: value for name, value in config.values().items() if name not in HOST_OPTIONS}
    require_equal(collectives, json.dumps(values, sort_keys=True), "configs")


def require_equal(collectives: Collectives, text: str, subject: str) -> None:
    """Stop all processes if one has another text than rank 0."""
    if collectives.any_rank(collectives.broadcast_str(text) != text):
        raise ParallelError(f"{subject} differ between processes; start all of them with the same command and versions")


def require_equal_weights(collectives: Collectives, model: nn.Module) -> None:
    """Stop all processes if replicas of a stage hold different weights."""
    topology = collectives.topology
    if topology.replicas == 1:
        return
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    digests = torch.zeros(topology.replicas, dtype=torch.int64)
    digests[topology.replica] = int.from_bytes(digest.digest(), "little", signed=True)
    digests = collectives.sum_over_replicas(digests)
    if collectives.any_rank(bool((digests != digests[0]).any())):
        raise ParallelError(
            "replicas hold different weights; start all of them with the same command, versions and files"
        )


def rank_zero_console(collectives: Collectives, console: Console) -> Console:
    """Return the console on rank 0, and on all ranks if CONVOLVE_ALL_OUTPUT is set; elsewhere a silent one."""
    return console if collectives.is_rank_zero or "CONVOLVE_ALL_OUTPUT" in os.environ else SilentConsole()
