"""How ranks meet: an open process group is adopted if it fits, and torchrun's store is used once per attempt."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from convolve.distributed.rendezvous import _open_store, choose_remedy, process_group
from convolve.distributed.topology import Topology
from convolve.errors import ParallelError

CPU = torch.device("cpu")


@pytest.fixture
def open_group():
    def open_(backend):
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)

    yield open_
    dist.destroy_process_group()


def test_an_open_process_group_is_adopted_and_stays_open(open_group):
    open_group("gloo")
    with process_group(Topology(), CPU):
        assert dist.is_initialized()
    assert dist.is_initialized()


def test_an_open_process_group_of_another_size_or_without_gloo_is_rejected(open_group):
    open_group("cuda:gloo")
    with pytest.raises(ParallelError, match="process group: rank 0 of 1, but RANK and WORLD_SIZE are 1 and 2"):
        process_group(Topology(replicas=2, rank=1), CPU).__enter__()
    with pytest.raises(ParallelError, match="process group: opened with cuda:gloo; open it with gloo"):
        process_group(Topology(), CPU).__enter__()


def test_a_store_of_torchrun_with_addresses_of_an_earlier_attempt_is_rejected(monkeypatch):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**variables, "TORCHELASTIC_RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(name, value)
    for rank in range(2):
        _open_store(Topology(2, rank=rank)).set(f"rank {rank}", "here")
    with pytest.raises(ParallelError, match="rank 1: torchrun started it again .* set TORCH_DISABLE_SHARE_RDZV"):
        _open_store(Topology(2, rank=1))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not _open_store(Topology(2, rank=1)).check(["rank 0"])


@pytest.mark.parametrize(
    ("master", "own", "remedy"),
    [
        ("a", "127.0.1.1", "the name of this host resolves to 127.0.1.1: set GLOO_SOCKET_IFNAME"),
        ("a", "10.0.0.1", "check the address"),
        ("localhost", "127.0.1.1", "check the address"),
        ("127.0.0.1", "127.0.1.1", "check the address"),
    ],
)
def test_a_host_whose_name_is_its_loopback_is_named_if_ranks_cannot_meet(master, own, remedy):
    assert choose_remedy({"MASTER_ADDR": master}, own).startswith(remedy)
