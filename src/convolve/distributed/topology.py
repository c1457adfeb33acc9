"""Ranks, replicas and stages of a run, from its config and the environment.

Ranks are numbered stage by stage within a replica: rank = replica * stages + stage. So the stages of a replica, which
communicate for every micro batch, are neighbors.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from convolve.config import ParallelConfig
from convolve.errors import ParallelError


@dataclass(frozen=True)
class Topology:
    """The layout of a run, and the rank of this process."""

    replicas: int = 1
    stages: int = 1
    rank: int = 0

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.replicas * self.stages

    @property
    def replica(self) -> int:
        """Copy of the model that this process belongs to."""
        return self.rank // self.stages

    @property
    def stage(self) -> int:
        """Part of the model that this process holds."""
        return self.rank % self.stages

    def same_stage(self, stage: int) -> list[int]:
        """Return the ranks that hold a stage in all replicas; they sum gradients."""
        return [replica * self.stages + stage for replica in range(self.replicas)]

    def same_replica(self, replica: int) -> list[int]:
        """Return the ranks of a replica in the order of its stages; they pass activations on."""
        return [replica * self.stages + stage for stage in range(self.stages)]


def is_distributed(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process was started as one of several, by torchrun, Slurm or with the same variables."""
    env = os.environ if environment is None else environment
    return "RANK" in env or int(env.get("SLURM_NTASKS", "1")) > 1


def find_rank(environment: Mapping[str, str] | None = None) -> int:
    """Return the rank of this process; 0 if it is the only one."""
    env = os.environ if environment is None else environment
    return int(env.get("RANK", env.get("SLURM_PROCID", "0")))


def leads_host(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process is the first one on its host; True if the processes of a host have no numbers."""
    env = os.environ if environment is None else environment
    return int(env.get("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))) == 0


def is_rank_zero() -> bool:
    """Return whether this process is the one that prints results, before or after it has collectives."""
    return find_rank() == 0


def started_replicas(config: ParallelConfig, environment: Mapping[str, str] | None = None) -> int:
    """Return how many replicas the processes that were started can run; those of the config if this one is alone."""
    env = os.environ if environment is None else environment
    if not is_distributed(env):
        return config.replicas
    world = _world_size(env)
    if world % config.shards:
        raise ParallelError(f"--shards {config.shards}: {world} processes started; start a multiple of {config.shards}")
    return world // config.shards


def _world_size(env: Mapping[str, str]) -> int:
    return int(env.get("WORLD_SIZE", env.get("SLURM_NTASKS", "1")))


def find_topology(config: ParallelConfig, environment: Mapping[str, str] | None = None) -> Topology:
    """Return the topology of a config with the rank of this process, and check the number of processes."""
    env = os.environ if environment is None else environment
    needed = Topology(config.replicas, config.shards)
    if not is_distributed(env):
        return needed
    world = _world_size(env)
    if world != needed.world:
        raise ParallelError(
            f"--replicas {config.replicas} --shards {config.shards}: {needed.world} processes needed, {world} started; "
            f"start {needed.world}, or change --replicas or --shards"
        )
    return Topology(config.replicas, config.shards, find_rank(env))
