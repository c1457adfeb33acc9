"""Optimizer state shared out over replicas."""

import torch
from torch import nn

from convolve.distributed.optimizer_sharding import NoSharding, OptimizerSharding, assign_owners


def test_owners_carry_about_the_same():
    sizes = [100, 1, 50, 50, 30, 30, 30, 10]
    owners = assign_owners(sizes, 3)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == one) for one in range(3)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= 1.2 * sum(sizes) / 3


def test_every_parameter_has_one_owner_among_the_replicas():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    shares = [OptimizerSharding(model, replica, 3, lambda flat, owner: None) for replica in range(3)]
    for name, _ in model.named_parameters():
        assert sum(share.owns(name) for share in shares) == 1


def test_spreading_takes_the_others_values_and_keeps_the_own():
    """Two replicas with different weights: after the exchange both hold what each owner had."""
    models = [nn.Linear(3, 4), nn.Linear(3, 4)]
    flats = {}
    for replica, model in enumerate(models):

        def note(flat, owner, replica=replica):
            if owner == replica:
                flats[owner] = flat.clone()

        OptimizerSharding(model, replica, 2, note).broadcast_updated(model)

    for replica, model in enumerate(models):
        OptimizerSharding(model, replica, 2, lambda flat, owner: flat.copy_(flats[owner])).broadcast_updated(model)
    one, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_sole_owner_owns_everything():
    assert NoSharding().owns("anything")
