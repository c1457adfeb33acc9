"""The collective backend of the virtual accelerator, `vccl`: gloo on the data of its tensors.

A process group in Python is the group of all devices, so it has a second gloo for tensors of the host, which a backend
in C++ would leave to the one that `init_process_group("cpu:gloo,virt:vccl")` names.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.utils._pytree import tree_flatten, tree_unflatten

from virtual_accelerator.tensors import DEVICE, NAME, VirtualTensor

BACKEND = "vccl"
OPERATIONS = ("allreduce", "allgather", "_allgather_base", "alltoall", "alltoall_base", "broadcast", "gather", "reduce")
OPERATIONS += ("reduce_scatter", "_reduce_scatter_base", "scatter", "send", "recv", "barrier")


class VirtualProcessGroup(dist.ProcessGroup):
    """Collectives of one group. The tensors of a call must all be on the device or all on the host."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._device = ProcessGroupGloo(dist.PrefixStore("device", store), rank, size, timeout)
        self._host = ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)

    def getBackendName(self):
        return BACKEND

    def _run(self, name, args, kwargs):
        values, spec = tree_flatten((args, kwargs))
        kinds = {isinstance(value, VirtualTensor) for value in values if isinstance(value, torch.Tensor)}
        if len(kinds) > 1:
            raise RuntimeError(f"{name}: tensors of {NAME} and of the host in one call")
        on_device = kinds == {True}
        if on_device:
            DEVICE.before_operation()
        values = [value.host if isinstance(value, VirtualTensor) else value for value in values]
        args, kwargs = tree_unflatten(values, spec)
        return getattr(self._device if on_device else self._host, name)(*args, **kwargs)


def _forward(name):
    return lambda self, *args, **kwargs: self._run(name, args, kwargs)


for _name in OPERATIONS:
    setattr(VirtualProcessGroup, _name, _forward(_name))


def register():
    """Add the backend to torch.distributed, as the default for the device."""
    dist.Backend.register_backend(BACKEND, VirtualProcessGroup, devices=[NAME])
