"""How the processes of a run find each other: the store in which they meet, and the process group.

A process group that exists already, such as the one that Ray opens in its workers, is used as it is.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from convolve.distributed.launch.local import STORE_VARIABLE
from convolve.distributed.launch.slurm import first_host
from convolve.distributed.topology import Topology
from convolve.errors import ParallelError


def read_timeout(environment: Mapping[str, str]) -> timedelta:
    """Return the timeout of a collective; CONVOLVE_PATIENCE is its name in version 0.1."""
    return timedelta(seconds=float(environment.get("CONVOLVE_TIMEOUT", environment.get("CONVOLVE_PATIENCE", 300))))


TIMEOUT = read_timeout(os.environ)


@contextmanager
def process_group(topology: Topology, device: torch.device) -> Iterator[None]:
    """Open the default process group for the block, or adopt the one that exists and leave it open."""
    if dist.is_initialized():
        _check_adopted(topology, device)
        yield
        return
    try:
        _open(topology, device)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def backends(kind: str) -> str:
    """Return the backends for a kind of device: gloo for tensors of the host, that of the device for its tensors."""
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def _check_adopted(topology: Topology, device: torch.device) -> None:
    if (dist.get_rank(), dist.get_world_size()) != (topology.rank, topology.world):
        raise ParallelError(
            f"process group: rank {dist.get_rank()} of {dist.get_world_size()}, but RANK and WORLD_SIZE are "
            f"{topology.rank} and {topology.world}; open it with the values of these variables"
        )
    found = dist.get_backend_config()
    if not {"cpu", device.type} <= {item.partition(":")[0] for item in found.split(",")}:
        raise ParallelError(f"process group: opened with {found}; open it with {backends(device.type)}")


def _open(topology: Topology, device: torch.device) -> None:
    if "MASTER_ADDR" not in os.environ and "SLURM_JOB_NODELIST" in os.environ:
        # Slurm sets no address.
        os.environ["MASTER_ADDR"] = first_host(os.environ["SLURM_JOB_NODELIST"])
        os.environ.setdefault("MASTER_PORT", "29500")
    try:
        with _deadly_signals():
            dist.init_process_group(
                backends(device.type),
                store=_open_store(topology),
                rank=topology.rank,
                world_size=topology.world,
                timeout=TIMEOUT,
            )
    except (RuntimeError, ValueError, OSError) as error:
        address = os.environ.get(STORE_VARIABLE) or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ParallelError(
            f"rank {topology.rank} of {topology.world}: cannot connect to {address} ({error}); "
            + choose_remedy(os.environ, _own_address())
        ) from error


def choose_remedy(environment: Mapping[str, str], own_address: str) -> str:
    """Return what to do if ranks cannot meet. Other hosts cannot reach one whose name is that of its loopback."""
    master = environment.get("MASTER_ADDR", "localhost")
    if own_address.startswith("127.") and master != "localhost" and not master.startswith("127."):
        return (
            f"the name of this host resolves to {own_address}: set GLOO_SOCKET_IFNAME to the interface between hosts "
            "and MASTER_ADDR to its address (launch: --interface, --master-addr)"
        )
    return "check the address, the port and that all processes were started"


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


@contextmanager
def _deadly_signals() -> Iterator[None]:
    """Inside the block, SIGTERM ends the process at once.

    A handler would not run while torch waits for processes that may never start, and there is nothing to save.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _open_store(topology: Topology) -> Store | None:
    """Return the store in which ranks meet; without an address torch reports what is missing.

    torch's own TCP store listens on all interfaces; this one listens on the rendezvous address only.
    """
    if path := os.environ.get(STORE_VARIABLE):
        return FileStore(path, topology.world)
    if "MASTER_ADDR" not in os.environ:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if topology.rank or shared:
        store = TCPStore(host, port, topology.world, is_master=False, timeout=TIMEOUT)
        return _claim_attempt(store, topology.rank) if shared else store
    family, _, _, _, address = _resolve(host, port)
    listener = socket.create_server(address[:2], family=family, backlog=topology.world)
    return TCPStore(host, port, topology.world, is_master=True, timeout=TIMEOUT, master_listen_fd=listener.detach())


def _claim_attempt(store: Store, rank: int) -> Store:
    """Return the part of torchrun's store for this attempt.

    Each agent counts its attempts, and a change of membership is not counted. Addresses of an earlier attempt would
    make ranks wait for processes that are gone.
    """
    attempt = PrefixStore(f"/worker/attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    if attempt.add(f"convolve/rank/{rank}", 1) > 1:
        raise ParallelError(
            f"rank {rank}: torchrun started it again in the store of an earlier attempt; "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )
    return attempt


def _resolve(host: str, port: int) -> Any:
    """Return the first address of a host. The name of a new pod may be unknown for some seconds."""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
