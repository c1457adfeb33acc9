"""The processes of a training as one team: what they add up, agree on and tell each other.

A process that is alone has a team too, the null object `Alone`; nobody has to ask how many there are.

Processes that train together must be about to do the same thing; whoever differs is found before the first step.

What is measured at a log point and at a validation, and what a run is to those who write it down.

Records in words and in JSON, the same wherever they are shown.

Who writes a run down: a protocol, the fan-out to many writers, and the three that write plain files.

What the application says while it works; the command line renders it, a program may ignore it.

Writers that speak to other tools: TensorBoard and Weights & Biases, both behind the extra `logs`.

They are imported when a writer is made, so that a missing extra is told before training starts and nobody else waits
for them. Most events stay in events.jsonl: neither tool has a place for them.
"""

import hashlib
import json
import os
import platform
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load as unpack_tensors
from safetensors.torch import save as pack_tensors
from torch import Tensor, nn

from convolve import __version__
from convolve.config import Config, ParallelConfig
from convolve.distributed.gradient_sync import (
    BucketedAllReduce,
    Finish,
    GradientSync,
    NoSync,
    fill_buckets,
)
from convolve.distributed.launch.slurm import first_host
from convolve.distributed.optimizer_sharding import NoSharding, OptimizerSharding
from convolve.distributed.pipeline import Pipeline, Shape
from convolve.distributed.shared_memory import SharedMemoryAllReduce
from convolve.distributed.topology import Topology, find_topology
from convolve.errors import ParallelError
from convolve.loggers.base import Console, SilentConsole

TIMEOUT = timedelta(seconds=float(os.environ.get("CONVOLVE_PATIENCE", 300)))
SHARED_LIMIT_BYTES = 64 << 20


class Collectives(Protocol):
    """What the engine and the application ask of the processes."""

    topology: Topology

    @property
    def first(self) -> bool:
        """Whether this process is the one that speaks, logs and saves."""

    def synchronizer(self, model: nn.Module, payload_size: int) -> GradientSync:
        """What sums this model's gradients over replicas, and a payload."""

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of a small tensor over replicas, on all of them, in the order of ranks."""

    def add_stages(self, values: Tensor) -> Tensor:
        """The sum of a small tensor over the stages of this replica, on all of them, in the order of ranks."""

    def span(self, replicas: int) -> Callable[[Tensor], Tensor]:
        """What adds a tensor up over groups of that many neighboring replicas."""

    def share_ownership(self, model: nn.Module) -> OptimizerSharding | NoSharding:
        """Optimizer state shared out over replicas."""

    def join_pipeline(self, part: nn.Module, shapes: tuple[Shape, Shape], schedule: str) -> Pipeline:
        """This process's place among the stages of its replica."""

    def collect(self, tensors: Mapping[str, Tensor], *, from_replicas: bool = False) -> dict[str, Tensor]:
        """At the first process: the tensors of all stages, and of all replicas where these hold different ones."""

    def agree(self, flag: bool) -> bool:
        """Whether any process says yes; the same answer everywhere."""

    def tell(self, text: str) -> str:
        """What rank 0 says, on all processes."""

    def require_equal(self, digest: str, what: str) -> None:
        """Stop all processes if one has another digest than rank 0."""

    def require_equal_weights(self, model: nn.Module) -> None:
        """Stop all processes if replicas hold different weights."""

    def close(self) -> None:
        """Leave the team."""


class SingleProcess:
    """One process, no others."""

    topology = Topology()
    first = True

    def synchronizer(self, model: nn.Module, payload_size: int) -> GradientSync:
        """Nothing to add up."""
        return NoSync()

    def add_up(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def add_stages(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def span(self, replicas: int) -> Callable[[Tensor], Tensor]:
        """Nobody to add up with."""
        return self.add_up

    def share_ownership(self, model: nn.Module) -> OptimizerSharding | NoSharding:
        """All belongs to one."""
        return NoSharding()

    def join_pipeline(self, part: nn.Module, shapes: tuple[Shape, Shape], schedule: str) -> Pipeline:
        """A pipeline needs others."""
        raise ParallelError("a pipeline needs a process for each stage; set --shards")

    def collect(self, tensors: Mapping[str, Tensor], *, from_replicas: bool = False) -> dict[str, Tensor]:
        """The tensors themselves."""
        return dict(tensors)

    def agree(self, flag: bool) -> bool:
        """The own answer."""
        return flag

    def tell(self, text: str) -> str:
        """The own word."""
        return text

    def require_equal(self, digest: str, what: str) -> None:
        """Always equal."""

    def require_equal_weights(self, model: nn.Module) -> None:
        """Always equal."""

    def close(self) -> None:
        """Nothing to leave."""


class DistributedCollectives:
    """Processes joined by torch.distributed; replicas of one host add up through shared memory where it fits."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        _find_master()
        try:
            dist.init_process_group("gloo", rank=topology.rank, world_size=topology.world, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ParallelError(
                f"rank {topology.rank} of {topology.world} cannot meet the others at {address} ({error}); "
                "check the address, the port and that all processes were started"
            ) from error
        # Groups are made by all processes in the same order, also by those outside of them; each has its own timeout.
        self._replicas = [
            dist.new_group(topology.same_stage(stage), timeout=TIMEOUT) for stage in range(topology.stages)
        ][topology.stage]
        self._stages = [dist.new_group(topology.same_replica(r), timeout=TIMEOUT) for r in range(topology.replicas)][
            topology.replica
        ]

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.topology.rank == 0

    def synchronizer(self, model: nn.Module, payload_size: int) -> GradientSync:
        """Buckets over replicas; a single replica needs none."""
        if self.topology.replicas == 1:
            return NoSync()
        buckets = fill_buckets([one for one in model.parameters() if one.requires_grad], payload_size)
        largest = max(bucket.flat.numel() for bucket in buckets)
        return BucketedAllReduce(buckets, self._share_memory(largest) or self._through_sockets)

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over replicas."""
        return _ordered_sum(values, self._replicas)

    def add_stages(self, values: Tensor) -> Tensor:
        """The sum over the stages of this replica."""
        return _ordered_sum(values, self._stages)

    def span(self, replicas: int) -> Callable[[Tensor], Tensor]:
        """Sums over neighbors; all processes make all groups, in the same order."""
        topology = self.topology
        members = [topology.same_stage(stage) for stage in range(topology.stages)]
        spans = [ranks[i : i + replicas] for ranks in members for i in range(0, len(ranks), replicas)]
        groups = [(ranks, dist.new_group(ranks, timeout=TIMEOUT)) for ranks in spans]
        own = next(group for ranks, group in groups if topology.rank in ranks)
        return lambda values: _ordered_sum(values, own)

    def share_ownership(self, model: nn.Module) -> OptimizerSharding | NoSharding:
        """Each replica of a stage owns a part of it."""
        topology, ranks = self.topology, self.topology.same_stage(self.topology.stage)

        def hand(flat: Tensor, replica: int) -> None:
            dist.broadcast(flat, ranks[replica], group=self._replicas)

        return OptimizerSharding(model, (topology.replica, topology.replicas), hand)

    def join_pipeline(self, part: nn.Module, shapes: tuple[Shape, Shape], schedule: str) -> Pipeline:
        """This process's place among the stages of its replica."""
        return Pipeline(part, shapes, (self.topology.stage, self.topology.stages), self._stages, schedule)

    def collect(self, tensors: Mapping[str, Tensor], *, from_replicas: bool = False) -> dict[str, Tensor]:
        """Tensors travel to rank 0 as safetensors, one process after the other."""
        found = dict(tensors)
        for rank in range(1, self.topology.world if from_replicas else self.topology.stages):
            if self.topology.rank == rank:
                packed = pack_tensors({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
                data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
                dist.send(torch.tensor([len(data)]), 0)
                dist.send(data, 0)
            elif self.first:
                size = torch.zeros(1, dtype=torch.int64)
                dist.recv(size, rank)
                data = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(data, rank)
                found.update(unpack_tensors(data.numpy().tobytes()))
        return found

    def agree(self, flag: bool) -> bool:
        """Whether any process says yes."""
        votes = torch.tensor([int(flag)])
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes.item())

    def tell(self, text: str) -> str:
        """What rank 0 says."""
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0)
        told = data if self.topology.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(told, 0)
        return bytes(told.tolist()).decode()

    def require_equal(self, digest: str, what: str) -> None:
        """Compare digests with rank 0's."""
        if self.agree(self.tell(digest) != digest):
            raise ParallelError(
                f"{what} differ between processes; start all of them with the same command and versions"
            )

    def require_equal_weights(self, model: nn.Module) -> None:
        """Compare with the first replica of the same stage."""
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in model.state_dict().items():
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
        first = own.clone()
        dist.broadcast(first, self.topology.same_stage(self.topology.stage)[0], group=self._replicas)
        if self.agree(not own.equal(first)):
            raise ParallelError(
                "replicas hold different weights; start all of them with the same command, versions and files"
            )

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def _share_memory(self, capacity: int) -> SharedMemoryAllReduce | None:
        """A sum through memory for that many elements, if the replicas are on one host and it is no waste."""
        members = self.topology.same_stage(self.topology.stage)
        fits = 8 * capacity * len(members) <= SHARED_LIMIT_BYTES
        if fits and self._on_one_host():
            return self._open_shared(members.index(self.topology.rank), len(members), capacity)
        return None

    def _on_one_host(self) -> bool:
        here = socket.gethostname()
        return not self.agree(self.tell(here) != here)

    def _open_shared(self, index: int, count: int, capacity: int) -> SharedMemoryAllReduce:
        """Every stage has a file of its own; the first process makes it and all open it before its name goes."""
        first = self.topology.rank == 0
        folder = Path(self.tell(tempfile.mkdtemp(prefix="convolve-", dir=_memory_folder()) if first else ""))
        file = folder / f"stage-{self.topology.stage}"
        if index == 0:
            SharedMemoryAllReduce.create(file, count, capacity)
        dist.barrier()
        shared = SharedMemoryAllReduce(file, index, count, capacity)
        dist.barrier()
        if index == 0:
            file.unlink()
        dist.barrier()
        if first:
            folder.rmdir()
        return shared

    def _through_sockets(self, flat: Tensor) -> Finish:
        work = dist.all_reduce(flat, group=self._replicas, async_op=True)
        assert work is not None, "an asynchronous operation has a handle"

        def finish() -> None:
            work.wait()

        return finish


@contextmanager
def open_collectives(config: ParallelConfig) -> Iterator[Collectives]:
    """The team that a config asks for; it is left at the end, also after an error."""
    topology = find_topology(config)
    team: Collectives = SingleProcess() if topology.world == 1 else DistributedCollectives(topology)
    try:
        yield team
    except RuntimeError as error:
        if not _is_connection_error(error):
            raise
        raise ParallelError(
            f"rank {topology.rank} lost the others ({_first_sentence(error)}); go on with `convolve restore`"
        ) from error
    finally:
        team.close()


def _is_connection_error(error: RuntimeError) -> bool:
    """Whether gloo, which knows no error of its own, complains that a process or the way to it is gone."""
    return any(word in str(error) for word in ("gloo", "Connection closed", "Connection reset", "timed out"))


def _first_sentence(error: RuntimeError) -> str:
    """The first sentence of an error of the library, without the line of its source."""
    return re.sub(r"^\[[^]]*\] *", "", str(error).strip()).splitlines()[0].partition(". ")[0]


def _ordered_sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts are added in the order of ranks, so one process that added them would get the same bits."""
    parts = [torch.empty_like(values) for _ in range(group.size())]
    if len(parts) == 1:
        return values
    dist.all_gather(parts, values.contiguous(), group=group)
    for part in parts[1:]:
        parts[0] += part
    return parts[0]


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _find_master() -> None:
    """Slurm sets no address; its first host takes the part."""
    if "MASTER_ADDR" not in os.environ and "SLURM_JOB_NODELIST" in os.environ:
        os.environ["MASTER_ADDR"] = first_host(os.environ["SLURM_JOB_NODELIST"])
        os.environ.setdefault("MASTER_PORT", "29500")


# Where a host keeps its data, and how many threads it has, is its own affair.
HOST_OPTIONS = ("data_dir", "threads", "workers", "device")


def require_same_start(team: Collectives, config: Config) -> None:
    """Stop all processes if one has other versions or another config than the first."""
    versions = f"convolve {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    team.require_equal(versions, "versions of convolve, torch or Python")
    values = {knob: value for knob, value in config.values().items() if knob not in HOST_OPTIONS}
    team.require_equal(json.dumps(values, sort_keys=True), "configs")


def rank_zero_console(team: Collectives, console: Console) -> Console:
    """The first process speaks for all of them, unless everybody was asked to."""
    return console if team.first or "CONVOLVE_ALL_OUTPUT" in os.environ else SilentConsole()
