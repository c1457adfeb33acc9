"""Weights from elsewhere: our own, torchvision's and timm's names, and files that are rejected."""

import re

import pytest
import torch
from safetensors.torch import save_file

from convolve.checkpoint.pretrained import load_pretrained
from convolve.config.schema import ModelConfig
from convolve.errors import CheckpointError
from convolve.models import registry


def build(name, classes=10, seed=0, shape=(3, 32, 32)):
    return registry.build(name, classes=classes, input_shape=shape, seed=seed, options=ModelConfig(model=name))


def store(path, tensors):
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
    return path


def timm_names(state):
    """The names that timm gives to an EfficientNet, written from its documentation of blocks."""
    renamed = {}
    for name, tensor in state.items():
        name = re.sub(r"^features\.0\.0", "conv_stem", name)
        name = re.sub(r"^features\.0\.1", "bn1", name)
        name = re.sub(r"^features\.8\.0", "conv_head", name)
        name = re.sub(r"^features\.8\.1", "bn2", name)
        name = re.sub(r"^classifier\.1", "classifier", name)
        if match := re.match(r"features\.(\d)\.(\d+)\.block\.(\d)\.(fc1|fc2|0|1)\.(.*)", name):
            stage, index, layer, part, kind = match.groups()
            first = ["conv_dw", "bn1"], ["se.conv_reduce", "se.conv_expand"], ["conv_pw", "bn2"]
            later = ["conv_pw", "bn1"], ["conv_dw", "bn2"], ["se.conv_reduce", "se.conv_expand"], ["conv_pwl", "bn3"]
            pair = (first if stage == "1" else later)[int(layer)]
            name = f"blocks.{int(stage) - 1}.{index}.{pair[part in ('1', 'fc2')]}.{kind}"
        renamed[name] = tensor
    return renamed


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_our_names_are_loaded_bit_for_bit(tmp_path, prefix):
    source, target = build("resnet8-cifar", seed=1), build("resnet8-cifar", seed=2)
    tensors = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    report = load_pretrained(target, store(tmp_path / "w.safetensors", tensors))
    assert same(source, target)
    assert (report.loaded, report.new) == (len(tensors), ())


@pytest.mark.parametrize("name", ["efficientnet-b0", "efficientnet-cifar"])
def test_timm_names_are_understood(tmp_path, name):
    source, target = build(name, seed=1), build(name, seed=2)
    tensors = timm_names(source.state_dict())
    assert {"conv_stem.weight", "blocks.2.0.se.conv_reduce.bias", "blocks.6.0.bn3.weight"} <= set(tensors)
    load_pretrained(target, store(tmp_path / "w.safetensors", tensors))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(source.eval()(x), target.eval()(x))


def test_another_number_of_classes_keeps_a_fresh_head(tmp_path):
    source, target, untouched = build("resnet10", 7, seed=1), build("resnet10", 3, seed=2), build("resnet10", 3, seed=2)
    report = load_pretrained(target, store(tmp_path / "w.safetensors", source.state_dict()))
    assert report.new == ("fc.weight", "fc.bias")
    assert torch.equal(target.state_dict()["fc.weight"], untouched.state_dict()["fc.weight"])
    assert torch.equal(target.state_dict()["layer4.0.conv1.weight"], source.state_dict()["layer4.0.conv1.weight"])


def test_statistics_counters_may_be_missing(tmp_path):
    source = build("resnet8-cifar", seed=1)
    tensors = {name: tensor for name, tensor in source.state_dict().items() if "num_batches" not in name}
    load_pretrained(build("resnet8-cifar"), store(tmp_path / "w.safetensors", tensors))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet14-cifar", "the model has 'layer1.1.conv1.weight', 'layer1.1.bn1.weight', 'layer1.1.bn1.bias' and"),
        ("resnet11-cifar", "the model has 'layer1.0.conv3.weight', "),
        ("lenet5", "which the file lacks; the file has 'bn1.bias', 'bn1.running_mean', "),
    ],
)
def test_weights_of_another_model_are_rejected(tmp_path, model, message):
    path = store(tmp_path / "w.safetensors", build("resnet8-cifar").state_dict())
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_pretrained(build(model), path)


def test_surplus_and_misshaped_weights_are_named(tmp_path):
    state = build("resnet8-cifar").state_dict()
    with pytest.raises(CheckpointError, match="the file has 'extra', which the model lacks"):
        load_pretrained(build("resnet8-cifar"), store(tmp_path / "a.safetensors", {**state, "extra": torch.zeros(1)}))
    gray = build("resnet8-cifar", shape=(1, 32, 32))
    with pytest.raises(CheckpointError, match=r"'conv1.weight' has shape \[16, 3, 3, 3\], the model needs \[16, 1"):
        load_pretrained(gray, store(tmp_path / "b.safetensors", state))


def test_a_pickle_is_rejected_with_the_command_that_converts_it(tmp_path):
    torch.save({"w": torch.zeros(1)}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="convert it first: convolve convert"):
        load_pretrained(build("resnet8-cifar"), tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="no such file"):
        load_pretrained(build("resnet8-cifar"), tmp_path / "none.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_pretrained(build("resnet8-cifar"), tmp_path / "w.safetensors")


def test_the_head_is_the_last_block_with_weights():
    assert build("fastnet").head() == {"fc.weight"}
    assert build("efficientnet-cifar").head() == {"classifier.1.weight", "classifier.1.bias"}
