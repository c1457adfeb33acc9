"""Optimizer state shared out over replicas: each keeps, and updates with, its own part of it.

Every replica has the whole gradient after the sum. It updates the parameters that it owns, and then hands them to the
others; the result is that of a plain optimizer, with 1/N of the state in each process. Owners are chosen so that all
have about the same number of weights to look after, by the same rule everywhere.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Broadcast = Callable[[Tensor, int], None]
"""Makes a flat tensor, in place, what the replica of that number holds."""


def assign_owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """The replica that owns each of several parameters: the largest first, always to the one with the least so far."""
    loads, owners = [0] * replicas, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owner = loads.index(min(loads))
        owners[place] = owner
        loads[owner] += sizes[place]
    return owners


class OptimizerSharding:
    """Which parameters this replica updates, and how it gets the others."""

    def __init__(self, model: nn.Module, place: tuple[int, int], hand: Broadcast) -> None:
        self._replica, self._replicas = place
        self._hand = hand
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        owners = assign_owners([one.numel() for _, one in named], self._replicas)
        self._names = {name: owner for (name, _), owner in zip(named, owners, strict=True)}

    def owns(self, name: str) -> bool:
        """Whether this replica keeps the state of a parameter."""
        return self._names.get(name, self._replica) == self._replica

    def spread(self, model: nn.Module) -> None:
        """After an update, give the own parameters to the other replicas and take theirs."""
        parameters = dict(model.named_parameters())
        for owner in range(self._replicas):
            mine = [parameters[name].data for name, one in self._names.items() if one == owner]
            if not mine:
                continue
            flat = torch.cat([one.reshape(-1) for one in mine])
            self._hand(flat, owner)
            if owner != self._replica:
                for one, part in zip(mine, flat.split([one.numel() for one in mine]), strict=True):  # type: ignore[no-untyped-call]
                    one.copy_(part.view(one.shape))


class NoSharding:
    """Every process keeps the state of all of its parameters."""

    def owns(self, name: str) -> bool:
        """It does."""
        return True

    def spread(self, model: nn.Module) -> None:
        """Nothing is missing."""
