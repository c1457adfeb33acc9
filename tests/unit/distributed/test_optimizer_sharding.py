"""Optimizer state sharded over replicas."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from convolve.distributed.optimizer_sharding import NoSharding, OptimizerSharding, assign_owners


def test_owners_have_about_the_same_number_of_weights():
    sizes = [100, 1, 50, 50, 30, 30, 30, 10]
    owners = assign_owners(sizes, 3)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == one) for one in range(3)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= 1.2 * sum(sizes) / 3


def test_every_parameter_has_one_owner_among_the_replicas():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    shardings = [OptimizerSharding(model, replica, 3, lambda flat, owner: None) for replica in range(3)]
    for name, _ in model.named_parameters():
        assert sum(sharding.owns(name) for sharding in shardings) == 1


def test_a_broadcast_receives_the_parameters_of_other_owners_and_keeps_those_of_this_replica():
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


def test_without_sharding_every_process_owns_everything():
    assert NoSharding().owns("anything")


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 8))
def test_no_replica_owns_more_than_a_fair_part_and_the_largest_parameter(sizes, replicas):
    owners = assign_owners(sizes, replicas)
    loads = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == index) for index in range(replicas)
    ]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / replicas + max(sizes)
    assert assign_owners(sizes, replicas) == owners, "all replicas must compute the same owners"


def test_frozen_parameters_are_neither_counted_nor_sent():
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    sent = []
    sharding = OptimizerSharding(model, 0, 2, lambda flat, owner: sent.append((owner, flat.numel())))
    sharding.broadcast_updated(model)
    assert sent == [(0, 4), (1, 2)]


def test_a_replica_without_parameters_sends_nothing():
    model = nn.Linear(3, 2, bias=False)
    sent = []
    OptimizerSharding(model, 0, 3, lambda flat, owner: sent.append(owner)).broadcast_updated(model)
    assert sent == [0]
