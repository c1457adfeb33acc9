"""Who is who among the processes of a training.

Ranks are numbered stage by stage within a replica: rank = replica * stages + stage. So the stages of one replica, which
talk to each other for every micro batch, are neighbors.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from convolve.config import ParallelConfig
from convolve.errors import ParallelError


@dataclass(frozen=True)
class Topology:
    """The layout of a training, and this process's place in it."""

    replicas: int = 1
    stages: int = 1
    rank: int = 0

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.replicas * self.stages

    @property
    def replica(self) -> int:
        """Which copy of the model this process works for."""
        return self.rank // self.stages

    @property
    def stage(self) -> int:
        """Which part of the model this process holds."""
        return self.rank % self.stages

    def same_stage(self, stage: int) -> list[int]:
        """Ranks that hold one stage, over all replicas: they share gradients."""
        return [replica * self.stages + stage for replica in range(self.replicas)]

    def same_replica(self, replica: int) -> list[int]:
        """Ranks of one replica, in the order of its stages: they pass activations on."""
        return [replica * self.stages + stage for stage in range(self.stages)]


def is_distributed(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process was started as one of several, by torchrun, Slurm or whoever sets the same variables."""
    env = os.environ if environment is None else environment
    return "RANK" in env or int(env.get("SLURM_NTASKS", "1")) > 1


def is_rank_zero() -> bool:
    """Whether this process is the one that prints: rank 0, or the only one."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def find_topology(config: ParallelConfig, environment: Mapping[str, str] | None = None) -> Topology:
    """The topology that a config asks for, with this process's rank; the number of processes must be right."""
    env = os.environ if environment is None else environment
    wanted = Topology(config.replicas, config.shards)
    if not is_distributed(env):
        return wanted
    rank = int(env.get("RANK", env.get("SLURM_PROCID", "0")))
    world = int(env.get("WORLD_SIZE", env.get("SLURM_NTASKS", "1")))
    if world != wanted.world:
        raise ParallelError(
            f"{world} processes were started, but replicas={config.replicas} x shards={config.shards} need "
            f"{wanted.world}; start as many, or change --replicas or --shards"
        )
    return Topology(config.replicas, config.shards, rank)
