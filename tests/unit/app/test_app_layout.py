"""Every shipped layout can be built: each rank gets its blocks, and together they are the network."""

import pytest

from convolve.app.costing import sketch_network
from convolve.app.layout import check_splits, choose_splits, cut
from convolve.config.loading import resolve, shipped
from convolve.errors import ConfigError
from convolve.parallel.team import Alone
from convolve.parallel.topology import Topology


def layouts():
    """One config for each model and layout among those that need several devices."""
    found = {}
    for name in shipped():
        config = resolve(name, None, {}).config
        if config.parallel.replicas * config.parallel.shards > 1:
            found.setdefault((config.model.model, config.parallel), name)
    return sorted(found.values())


@pytest.mark.parametrize("name", layouts())
def test_every_rank_of_a_shipped_config_has_its_blocks(name):
    config = resolve(name, None, {}).config
    network = sketch_network(config)
    check_splits(network, config)
    stages = cut(network, choose_splits(network, config, Alone()) if config.parallel.shards > 1 else [])
    parts = [network.part(blocks, network.input_shape) for blocks in stages]
    world = config.parallel.replicas * config.parallel.shards
    held = [
        set(parts[Topology(config.parallel.replicas, config.parallel.shards, rank).stage].state_dict())
        for rank in range(world)
    ]
    first = held[: config.parallel.shards]
    assert set().union(*first) == set(network.state_dict())
    assert sum(map(len, first)) == len(network.state_dict())
    assert held == first * config.parallel.replicas
    if config.parallel.enable_recomputation:
        network.recompute(config.parallel.recompute_checkpoints)


def test_more_stages_than_blocks_are_refused():
    config = resolve("lenet-digits", None, {"shards": 30}).config
    with pytest.raises(ConfigError, match="shards=30: lenet-bn has 9 blocks"):
        check_splits(sketch_network(config), config)


def test_a_pattern_that_fits_no_block_is_named():
    config = resolve("resnet20-cifar10", None, {}).config
    with pytest.raises(ConfigError, match=r"recompute-checkpoints=layer9\*: no block fits it"):
        sketch_network(config).recompute(["layer1/*", "layer9*"])
