"""The first host of a Slurm job."""

import pytest

from convolve.distributed.launch.slurm import first_host
from convolve.errors import ParallelError


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node1,node2", "node1"),
        ("node[01-04]", "node01"),
        ("gpu-node-[003,007-9],other", "gpu-node-003"),
        ("my-host,other-[1-2]", "my-host"),
    ],
)
def test_the_first_host_of_a_list_is_found(nodes, first):
    assert first_host(nodes) == first


def test_a_list_without_a_host_is_named():
    with pytest.raises(ParallelError, match="contains no host"):
        first_host("")
