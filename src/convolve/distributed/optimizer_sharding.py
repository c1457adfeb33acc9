"""Optimizer state sharded over replicas (`--rts`).

After the gradient sync every replica has the whole gradient. It updates the parameters that it owns and broadcasts
them; the result is that of a plain optimizer, with 1/N of the state in each process. All replicas compute the same
owners, which have about the same number of weights.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from convolve.distributed.collectives import Collectives

Broadcast = Callable[[Tensor, int], None]
"""Overwrites a flat tensor with that of the replica of this number."""


def assign_owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """Return the replica that owns each parameter: largest first, always to the replica with the least so far."""
    loads, owners = [0] * replicas, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


class OptimizerSharding:
    """The parameters that this replica updates, and the broadcast of all updated parameters."""

    def __init__(self, model: nn.Module, replica: int, replicas: int, broadcast: Broadcast) -> None:
        self._replica, self._replicas = replica, replicas
        self._broadcast = broadcast
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        owners = assign_owners([parameter.numel() for _, parameter in named], replicas)
        self._owners = {name: owner for (name, _), owner in zip(named, owners, strict=True)}

    def owns(self, name: str) -> bool:
        """Return whether this replica keeps the optimizer state of a parameter."""
        return self._owners.get(name, self._replica) == self._replica

    def broadcast_updated(self, model: nn.Module) -> None:
        """Send the parameters that this replica updated to the others, and receive theirs."""
        parameters = dict(model.named_parameters())
        for owner in range(self._replicas):
            weights = [parameters[name].data for name, owned_by in self._owners.items() if owned_by == owner]
            if not weights:
                continue
            flat = torch.cat([weight.reshape(-1) for weight in weights])
            self._broadcast(flat, owner)
            if owner != self._replica:
                sizes = [weight.numel() for weight in weights]
                for weight, received in zip(weights, flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                    weight.copy_(received.view(weight.shape))


class NoSharding:
    """Every process keeps the optimizer state of all of its parameters."""

    def owns(self, name: str) -> bool:
        return True

    def broadcast_updated(self, model: nn.Module) -> None: ...


def build(collectives: Collectives, model: nn.Module) -> OptimizerSharding | NoSharding:
    """Return the sharding of a stage over its replicas."""
    topology = collectives.topology
    if topology.replicas == 1:
        return NoSharding()
    ranks = topology.same_stage(topology.stage)

    def broadcast(flat: Tensor, replica: int) -> None:
        dist.broadcast(flat, ranks[replica], group=collectives.replica_group)

    return OptimizerSharding(model, topology.replica, topology.replicas, broadcast)
