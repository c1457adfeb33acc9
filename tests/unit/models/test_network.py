from collections import OrderedDict

import pytest
import torch
from torch import nn

from convolve.errors import ConfigError
from convolve.models.network import Network


def make_blocks() -> dict[str, nn.Module]:
    return {
        "conv1": nn.Conv2d(3, 4, 3),
        "layer1/0": nn.Sequential(OrderedDict(conv1=nn.Conv2d(4, 4, 1))),
        "layer1/1": nn.Sequential(OrderedDict(conv1=nn.Conv2d(4, 4, 1))),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(4 * 6 * 6, 5),
    }


def test_nested_blocks_have_the_parameter_names_of_torchvision() -> None:
    network = Network(make_blocks(), input_shape=(3, 8, 8))
    assert [name for name in network.state_dict() if "weight" in name] == [
        "conv1.weight",
        "layer1.0.conv1.weight",
        "layer1.1.conv1.weight",
        "fc.weight",
    ]


def test_blocks_are_applied_in_their_order() -> None:
    blocks = make_blocks()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    network = Network(blocks, input_shape=(3, 8, 8))
    assert list(network.blocks) == list(blocks)
    assert torch.equal(network(x), nn.Sequential(*blocks.values())(x))


def test_folders_may_be_entered_in_any_order() -> None:
    network = Network(
        {"b/1": nn.ReLU(), "a/x/0": nn.Sigmoid(), "b/0": nn.Flatten()},
        input_shape=(1, 2, 2),
    )
    assert [type(block).__name__ for block in network.blocks.values()] == ["ReLU", "Sigmoid", "Flatten"]


def test_a_part_of_a_model_has_the_same_parameter_names() -> None:
    blocks = make_blocks()
    part = Network({name: blocks[name] for name in ("layer1/1", "flatten", "fc")}, input_shape=(4, 6, 6))
    assert set(part.state_dict()) < set(Network(make_blocks(), input_shape=(3, 8, 8)).state_dict())


def test_a_block_that_is_replaced_later_is_the_one_that_runs() -> None:
    network = Network(make_blocks(), input_shape=(3, 8, 8))
    network.get_submodule("layer1").add_module("1", nn.Identity())
    assert isinstance(network.blocks["layer1/1"], nn.Identity)


@pytest.mark.parametrize("names", [("a", "a/0"), ("a/0", "a"), ("a.b",), ("forward",), ("forward/0",), ("",), ("a/",)])
def test_a_name_that_cannot_be_a_module_is_rejected(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"block name {names[-1]}: .*choose another name"):
        Network({name: nn.ReLU() for name in names}, input_shape=(1, 2, 2))
