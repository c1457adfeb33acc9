from pathlib import Path

import pytest
import torch

from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError
from convolve.models import registry
from convolve.models.network import Network

SOURCE = """
from torch import nn

from convolve.models.spec import ModelSpec
from convolve.layers.init import PerLayerInit, fan_in_uniform, zeros


def blocks(order):
    channels, height, width = order.input_shape
    return {"flatten": nn.Flatten(), "fc": nn.Linear(channels * height * width, order.classes)}


SOFTMAX = ModelSpec(blocks, PerLayerInit(fan_in_uniform, fan_in_uniform, zeros), "softmax regression")
WRONG = 5
"""


def build(name: str, classes: int = 10, shape: tuple[int, int, int] = (1, 28, 28)) -> Network:
    return registry.build(name, classes=classes, input_shape=shape, seed=0, options=ModelConfig())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that offers networks; its entry points are written by `offer`."""
    (tmp_path / "other_networks.py").write_text(SOURCE)
    info = tmp_path / "other_networks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-networks\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    return info


def offer(package: Path, *lines: str) -> None:
    (package / "entry_points.txt").write_text("\n".join(["[convolve.models]", *lines, ""]))


def test_the_four_digit_models_are_registered() -> None:
    assert set(registry.names()) >= {"lenet5", "lenet-bn", "cnn-wide", "lenet-sigmoid"}
    assert registry.names() == sorted(registry.names())


def test_every_model_has_a_description() -> None:
    assert all(registry.find(name).summary for name in registry.names())


def test_an_unknown_size_lists_all_of_its_family_in_order() -> None:
    with pytest.raises(ConfigError, match="efficientnet-b9: unknown name; known of its family are e"):
        build("efficientnet-b9")
    with pytest.raises(ConfigError, match="are resnet, resnet8-cifar, resnet10, .*resnet110-cifar, resnet152$"):
        build("resnet_999")


def test_a_name_of_no_family_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="model resent50: unknown name; did you mean resnet50"):
        build("resent50")


def test_one_class_is_not_a_classifier() -> None:
    with pytest.raises(ConfigError, match="model lenet5 with 1 classes: a classifier needs at least 2"):
        build("lenet5", classes=1)


def test_an_empty_image_is_rejected() -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        build("lenet5", shape=(0, 28, 28))


def test_a_sketch_has_names_and_no_values() -> None:
    network = registry.build_meta("lenet5", classes=10, input_shape=(1, 28, 28), options=ModelConfig())
    assert all(parameter.is_meta for parameter in network.parameters())
    assert list(network.state_dict()) == list(build("lenet5").state_dict())


def test_a_model_of_another_package_is_registered(package: Path) -> None:
    offer(package, "softmax = other_networks:SOFTMAX")
    assert "softmax" in registry.names()
    network = build("softmax", classes=3)
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 3)
    assert not network.get_parameter("fc.bias").any()


def test_a_name_that_two_packages_register_is_rejected(package: Path) -> None:
    offer(package, "lenet5 = other_networks:SOFTMAX")
    with pytest.raises(ConfigError, match=r"model lenet5: offered more than once \(convolve, other-networks\)"):
        build("lenet5")


def test_a_package_that_cannot_be_imported_is_named(package: Path) -> None:
    offer(package, "broken = other_networks_gone:SOFTMAX")
    with pytest.raises(ConfigError, match="model broken: cannot import other_networks_gone:SOFTMAX"):
        build("broken")
    assert build("lenet5").blocks


def test_an_object_that_is_not_an_architecture_is_rejected(package: Path) -> None:
    offer(package, "wrong = other_networks:WRONG")
    with pytest.raises(ConfigError, match="model wrong: is int; give an nn.Module"):
        build("wrong")
