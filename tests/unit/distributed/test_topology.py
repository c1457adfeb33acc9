"""Ranks, replicas and stages, from any launcher's environment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convolve.config import ParallelConfig
from convolve.distributed.topology import Topology, find_rank, find_topology, is_distributed
from convolve.errors import ParallelError

COUNTS = st.integers(1, 9)


@given(COUNTS, COUNTS)
def test_every_rank_is_one_stage_of_one_replica(replicas, stages):
    ranks = [Topology(replicas, stages, rank) for rank in range(replicas * stages)]
    assert len({(topology.replica, topology.stage) for topology in ranks}) == ranks[0].world
    for topology in ranks:
        assert topology.rank in topology.same_stage(topology.stage)
        assert topology.rank in topology.same_replica(topology.replica)
        assert set(topology.same_stage(topology.stage)) & set(topology.same_replica(topology.replica)) == {
            topology.rank
        }


@given(COUNTS, COUNTS)
def test_groups_of_stages_and_of_replicas_are_partitions_of_all_ranks(replicas, stages):
    topology = Topology(replicas, stages)
    by_stage = [topology.same_stage(stage) for stage in range(stages)]
    by_replica = [topology.same_replica(replica) for replica in range(replicas)]
    for groups in (by_stage, by_replica):
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world))
    assert all(group == list(range(group[0], group[0] + stages)) for group in by_replica)


@pytest.mark.parametrize(
    ("environment", "distributed", "rank"),
    [
        ({}, False, 0),
        ({"RANK": "3", "WORLD_SIZE": "4"}, True, 3),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, True, 2),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False, 0),
        ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, True, 1),
    ],
)
def test_torchrun_and_slurm_set_the_rank(environment, distributed, rank):
    assert is_distributed(environment) == distributed
    assert find_rank(environment) == rank
    config = ParallelConfig(replicas=2, shards=2)
    assert find_topology(config, environment) == Topology(2, 2, rank)


@pytest.mark.parametrize("world", ["1", "3", "8"])
def test_a_wrong_number_of_processes_is_rejected_with_both_numbers(world):
    with pytest.raises(ParallelError, match=f"--replicas 2 --shards 2: 4 processes needed, {world} started"):
        find_topology(ParallelConfig(replicas=2, shards=2), {"RANK": "0", "WORLD_SIZE": world})
