"""Every shipped layout can be built: each rank gets its blocks, and together they are the network."""

import pytest

from convolve.compat.names import canonical_splits
from convolve.config.loading import resolve, shipped
from convolve.distributed.collectives import SingleProcess
from convolve.distributed.partition import choose_splits, group_blocks, resolve_splits
from convolve.distributed.topology import Topology
from convolve.engine.build import build_on_meta
from convolve.errors import ConfigError
from convolve.models.network import recompute, subnetwork


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
    network = build_on_meta(config)
    stages = group_blocks(
        network, choose_splits(network, config, SingleProcess()) if config.parallel.shards > 1 else []
    )
    parts = [subnetwork(network, blocks, network.input_shape) for blocks in stages]
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
        recompute(network, config.parallel.recompute_checkpoints)


def test_more_stages_than_split_points_are_rejected():
    config = resolve("lenet-digits", None, {"shards": 30}).config
    with pytest.raises(ConfigError, match="--shards 30: lenet-bn can be split into at most 5 stages"):
        resolve_splits(build_on_meta(config), config)


def test_a_pattern_that_fits_no_block_is_named():
    config = resolve("resnet20-cifar10", None, {}).config
    with pytest.raises(ConfigError, match=r"recompute-checkpoints=layer9\*: no block fits it"):
        recompute(build_on_meta(config), ["layer1/*", "layer9*"])


@pytest.mark.parametrize(
    "theirs", ["b1/2/relu b2/3/relu b3/3/relu", "stage1/unit3/relu stage2/unit4/relu stage3/unit4/relu"]
)
def test_splits_of_graphcores_application_are_where_the_shipped_config_has_them(theirs):
    config = resolve("mk2_resnet50_bn_16ipus", None, {}).config
    assert canonical_splits(theirs.split(), list(build_on_meta(config).blocks)) == config.parallel.pipeline_splits


@pytest.mark.parametrize(
    ("model", "theirs", "ours"),
    [
        ("resnet50", "b1/2", "layer1/2"),
        ("resnet50", "b4/2/relu", "avgpool"),
        ("resnet50", "fc1", "fc"),
        ("resnet50", "layer2/0", "layer2/0"),
        ("resnet50", "b9/0/relu", "b9/0/relu"),
        ("resnet20-cifar", "b2/2/relu", "layer3/0"),
        ("efficientnet-b0", "block2b", "features/2/1"),
        ("efficientnet-b0", "Top", "features/8"),
        ("efficientnet-b0", "block2a/c", "block2a/c"),
    ],
)
def test_a_split_of_graphcores_application_is_a_block_of_ours_or_stays_unknown(model, theirs, ours):
    config = resolve(None, None, {"model": model}).config
    assert canonical_splits([theirs], list(build_on_meta(config).blocks)) == (ours,)


def test_a_config_with_their_splits_is_split_as_with_ours():
    def stages(splits):
        config = resolve("resnet20-cifar10", None, {"shards": 2, "pipeline_splits": splits}).config
        network = build_on_meta(config)
        return group_blocks(network, choose_splits(network, config, SingleProcess()))

    assert stages(["b2/2/relu"]) == stages(["layer3/0"])


def test_a_split_inside_a_block_is_rejected_with_a_table_of_blocks():
    config = resolve("resnet20-cifar10", None, {"shards": 2, "pipeline_splits": ["layer3/9"]}).config
    with pytest.raises(
        ConfigError, match=r"--pipeline-splits layer3/9: no stage can start there; .*\n +block +parameters"
    ):
        resolve_splits(build_on_meta(config), config)
