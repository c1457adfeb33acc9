"""Every shipped layout can be built: each rank gets its blocks, and together they are the whole model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from convolve.compat.names import canonical_splits
from convolve.config.loading import resolve, shipped
from convolve.distributed.collectives import SingleProcess
from convolve.distributed.optimizer_sharding import OptimizerSharding
from convolve.distributed.partition import LocalShard, choose_splits, group_blocks, resolve_splits, tabulate_blocks
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


RESNET = resolve("resnet20-cifar10", None, {}).config
NETWORK = build_on_meta(RESNET)
POINTS = list(NETWORK.split_points[1:])


@given(st.lists(st.sampled_from(POINTS), unique=True, max_size=5))
def test_any_split_points_divide_the_blocks_in_order(splits):
    stages = group_blocks(NETWORK, splits)
    assert [name for stage in stages for name in stage] == list(NETWORK.blocks)
    assert [stage[0] for stage in stages[1:]] == sorted(splits, key=list(NETWORK.blocks).index)
    assert all(stages)


@given(st.permutations(["layer1/1", "layer2/0", "layer3/1"]))
def test_splits_may_be_named_in_any_order(splits):
    config = RESNET.replace(shards=4, pipeline_splits=splits)
    assert resolve_splits(NETWORK, config) == ("layer1/1", "layer2/0", "layer3/1")


def test_automatic_splits_are_left_to_the_measurement():
    assert resolve_splits(NETWORK, RESNET.replace(shards=3)) is None


@pytest.mark.parametrize(("splits", "needed"), [(("layer2/0",), 2), (("layer1/1", "layer2/0", "layer3/0"), 2)])
def test_too_few_or_too_many_splits_are_rejected_with_the_number_needed(splits, needed):
    with pytest.raises(ConfigError, match=f"--shards 3 needs {needed} splits, one for each stage after the first"):
        resolve_splits(NETWORK, RESNET.replace(shards=3, pipeline_splits=splits))


def test_the_first_block_is_no_split_point():
    first = next(iter(NETWORK.blocks))
    with pytest.raises(ConfigError, match=f"--pipeline-splits {first}: no stage can start there"):
        resolve_splits(NETWORK, RESNET.replace(shards=2, pipeline_splits=(first,)))


def test_a_frozen_stage_is_rejected_with_its_blocks():
    config = resolve(
        "resnet20-cifar10", None, {"freeze_until": "layer3", "shards": 2, "pipeline_splits": ("layer2/0",)}
    )
    with pytest.raises(ConfigError, match=r"^stage 1 of 2 \(.* to layer1/2\) has no trainable parameter; move a split"):
        resolve_splits(build_on_meta(config.config), config.config)


def test_the_table_of_blocks_has_a_row_for_each_block():
    heading, *rows = tabulate_blocks(NETWORK, "resnet20-cifar").splitlines()
    assert heading.split() == ["block", "parameters", "multiply-adds", "activations"]
    assert [row.split()[0] for row in rows] == list(NETWORK.blocks)
    parameters = [int(row.split()[1].replace(",", "")) for row in rows]
    assert sum(parameters) == sum(weight.numel() for weight in NETWORK.parameters())


def test_a_shard_selects_the_tensors_of_its_blocks():
    tensors = {
        name: torch.zeros(1) for name in ("layer1.0.conv1.weight", "layer1.01.bias", "layer2.0.bn.bias", "fc.bias")
    }
    shard = LocalShard(remote_blocks=("layer1/0", "fc"))
    assert set(shard.select(tensors)) == {"layer1.01.bias", "layer2.0.bn.bias"}
    assert shard.select_state(tensors) == tensors and not shard.is_sharded
    assert LocalShard().select(tensors) == tensors


def test_a_shard_selects_the_optimizer_state_of_the_parameters_that_it_owns():
    model = nn.Linear(3, 2)
    state = {f"{name}.{moment}": torch.zeros(1) for name in ("weight", "bias") for moment in ("first", "second")}
    shards = [LocalShard((), OptimizerSharding(model, replica, 2, lambda flat, owner: None)) for replica in range(2)]
    assert [set(shard.select_state(state)) for shard in shards] == [
        {"weight.first", "weight.second"},
        {"bias.first", "bias.second"},
    ]
    assert all(shard.is_sharded for shard in shards)
