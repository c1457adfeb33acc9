"""Every registered model: output shapes, split points, parts that together are the whole, freezing and patterns."""

import pytest
import torch
from torch import nn

from convolve import rng
from convolve.config import ModelConfig
from convolve.errors import ConfigError
from convolve.models import registry
from convolve.models.network import (
    Network,
    apply_freezing,
    freeze_before,
    match_blocks,
    recompute,
    subnetwork,
)

ALL = [name for name in registry.names() if registry.find(name).resolve is None]
SMALL = [
    "lenet5",
    "lenet-bn",
    "resnet8-cifar",
    "resnext11-cifar",
    "efficientnet-cifar",
    "mobilenet-v3-small",
    "fastnet",
]
CIFAR = (3, 32, 32)


def shape_of(name):
    return (1, 28, 28) if registry.find(name).input_shape[0] == 1 else CIFAR


def build(name, **options):
    config = ModelConfig(model=name, **options)
    return registry.build(name, classes=10, input_shape=shape_of(name), seed=0, options=config)


def images(name, count=2):
    return torch.randn(count, *shape_of(name), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ALL)
def test_split_points_are_blocks_in_order_and_start_with_the_first(name):
    spec = registry.find(name)
    options = ModelConfig(model=name)
    network = registry.build_meta(name, classes=7, input_shape=spec.input_shape, options=options)
    names = list(network.blocks)
    positions = [names.index(point) for point in network.split_points]
    assert positions[0] == 0 and positions == sorted(set(positions))
    assert len(positions) >= 2, "every model can be split"
    assert [block for group in network.block_groups for block in group] == names
    assert not any(parameter.device.type != "meta" for parameter in network.parameters())


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("count", [1, 3])
def test_outputs_have_one_row_per_image_and_one_column_per_class(name, count):
    network = build(name).eval()
    with torch.no_grad():
        assert network(images(name, count)).shape == (count, 10)


@pytest.mark.parametrize("name", SMALL)
def test_parts_at_any_split_point_have_the_bits_of_the_whole(name):
    network = build(name).eval()
    names, x = list(network.blocks), images(name)
    with torch.no_grad():
        whole = network(x.clone())
        for point in network.split_points[1:]:
            cut = names.index(point)
            first = subnetwork(network, names[:cut], network.input_shape)
            hidden = first(x.clone())
            second = subnetwork(network, names[cut:], tuple(hidden.shape[1:]))
            assert torch.equal(second(hidden.clone()), whole), point


@pytest.mark.parametrize("name", SMALL)
def test_the_parameters_of_two_parts_are_those_of_the_whole(name):
    network = build(name)
    names = list(network.blocks)
    cut = names.index(network.split_points[len(network.split_points) // 2])
    parts = [subnetwork(network, part, network.input_shape) for part in (names[:cut], names[cut:])]
    keys = [set(part.state_dict()) for part in parts]
    assert not keys[0] & keys[1] and keys[0] | keys[1] == set(network.state_dict())


@pytest.mark.parametrize("name", SMALL)
def test_the_seed_determines_all_weights(name):
    one, same = build(name).state_dict(), build(name).state_dict()
    assert all(torch.equal(one[key], same[key]) for key in one)
    options = ModelConfig(model=name)
    other = registry.build(name, classes=10, input_shape=shape_of(name), seed=1, options=options).state_dict()
    assert any(not torch.equal(one[key], other[key]) for key in one if one[key].is_floating_point())


@pytest.mark.parametrize("name", ["resnet8-cifar", "lenet-bn"])
def test_freezing_until_a_block_leaves_only_later_ones_trainable(name):
    network = build(name)
    names = list(network.blocks)
    freeze_before(network, names[-1])
    last = set(network.blocks[names[-1]].parameters())
    assert {parameter for parameter in network.parameters() if parameter.requires_grad} == last
    network.train()
    assert not any(module.training for module in network.modules() if isinstance(module, nn.BatchNorm2d))


def test_freezing_until_a_folder_means_its_first_block():
    network = build("resnet8-cifar")
    freeze_before(network, "layer2")
    frozen = {name.split(".")[0] for name, parameter in network.named_parameters() if not parameter.requires_grad}
    assert frozen == {"conv1", "bn1", "layer1"}


def test_frozen_statistics_do_not_move():
    network = build("resnet8-cifar")
    apply_freezing(network, ModelConfig(model="resnet8-cifar", freeze_until="layer2"))
    before = {name: value.clone() for name, value in network.state_dict().items() if "running" in name}
    network.train()
    with rng.at(0, 0, 0):
        network(images("resnet8-cifar"))
    after = network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith(("bn1", "layer1")))


def test_a_filter_trains_parameters_by_parts_of_their_names():
    network = build("resnet8-cifar")
    apply_freezing(network, ModelConfig(model="resnet8-cifar", variable_filter=("fc", "layer3.0.conv1")))
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert trained == {"fc.weight", "fc.bias", "layer3.0.conv1.weight"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze_until": "layer9"}, "layer9"),
        ({"variable_filter": ("layer9",)}, "layer9"),
    ],
)
def test_freezing_what_does_not_exist_is_an_error_that_suggests_names(options, message):
    with pytest.raises(ConfigError, match=message):
        apply_freezing(build("resnet8-cifar"), ModelConfig(model="resnet8-cifar", **options))


def test_patterns_match_blocks_as_in_a_shell():
    names = ["conv1", "layer1/0", "layer1/1", "layer2/1"]
    assert match_blocks(names, ["layer*/1"]) == {"layer1/1", "layer2/1"}
    assert match_blocks(names, ["conv1", "layer1/?"]) == {"conv1", "layer1/0", "layer1/1"}
    assert match_blocks(names, []) == frozenset()


@pytest.mark.parametrize("kept", [(), ("layer2/*",), ("conv1", "layer3/0")])
def test_recomputation_at_any_block_has_the_gradients_of_a_plain_pass(kept):
    plain, recomputed = build("resnet8-cifar").train(), build("resnet8-cifar").train()
    recompute(recomputed, kept)
    gradients = []
    for network in (plain, recomputed):
        with rng.at(0, 0, 0):
            network(images("resnet8-cifar", 4)).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_groups_of_blocks_that_are_not_consecutive_are_rejected():
    blocks = {"a": nn.ReLU(), "b": nn.ReLU(), "c": nn.ReLU()}
    assert Network(blocks, input_shape=(1, 2, 2), block_groups=[("b", "c")]).split_points == ["a", "b"]
    with pytest.raises(ConfigError, match="not consecutive blocks of a, b, c"):
        Network(blocks, input_shape=(1, 2, 2), block_groups=[("a", "c")])
