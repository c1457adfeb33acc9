"""Weights from elsewhere: our own, torchvision's and timm's names, and files that are rejected."""

import re

import pytest
import torch
from safetensors.torch import save_file

from convolve.checkpoint.pretrained import adopt_weights, find_weights, load_pretrained
from convolve.config.loading import resolve
from convolve.config.schema import ModelConfig
from convolve.errors import CheckpointError, ConfigError
from convolve.loggers.base import SilentConsole
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


@pytest.mark.parametrize(
    ("name", "order", "remedy"),
    [
        ("layer2.0.conv1.weight", (2, 3, 1, 0), "it would fit after permute(3, 2, 0, 1), as in files of TensorFlow"),
        ("fc.weight", (1, 0), "it would fit after permute(1, 0), as in files of TensorFlow"),
    ],
)
def test_weights_in_another_order_of_axes_are_rejected_with_that_order(tmp_path, name, order, remedy):
    state = build("resnet8-cifar", seed=1).state_dict()
    target, untouched = build("resnet8-cifar", seed=2), build("resnet8-cifar", seed=2)
    path = store(tmp_path / "w.safetensors", {**state, name: state[name].permute(order)})
    with pytest.raises(CheckpointError, match=re.escape(f"'{name}' has shape")) as caught:
        load_pretrained(target, path)
    assert remedy in str(caught.value)
    assert same(target, untouched)


def test_a_transposed_classifier_of_other_classes_is_rejected(tmp_path):
    state = build("resnet8-cifar", 7).state_dict()
    path = store(tmp_path / "w.safetensors", {**state, "fc.weight": state["fc.weight"].T})
    with pytest.raises(CheckpointError, match="'fc.weight' has shape .*only the number of classes may differ"):
        load_pretrained(build("resnet8-cifar", 3), path)


class Lines(SilentConsole):
    def __init__(self):
        self.lines = []

    def info(self, line):
        self.lines.append(line)


def adopt(**options):
    console = Lines()
    return adopt_weights(resolve(None, None, options).config, console), console.lines


def test_settings_of_the_library_are_adopted_and_printed_in_one_line(tmp_path):
    source = build("efficientnet-cifar", 1000)
    path = store(tmp_path / "tf_efficientnet.safetensors", timm_names(source.state_dict()))
    config, lines = adopt(model="efficientnet-cifar", weights=str(path))
    assert (config.model.norm_epsilon, config.model.bn_decay, config.model.conv_padding) == (1e-3, 0.99, "same")
    assert (config.data.normalization, config.data.image_size, config.data.crop_fraction) == ("imagenet", 32, 0.875)
    assert lines == [
        "settings of the weights (timm): norm-epsilon 0.001, bn-decay 0.99, conv-padding same, "
        "normalization imagenet, image-size 32, crop-fraction 0.875"
    ]
    config, lines = adopt(model="efficientnet-cifar", weights=str(path), normalization="unit", image_size=32)
    assert (config.data.normalization, config.model.norm_epsilon) == ("unit", 1e-3)
    assert lines[0] == "warning: --normalization unit, but these weights were trained with imagenet"


def test_weights_without_known_origin_change_no_option(tmp_path):
    path = store(tmp_path / "w.safetensors", build("lenet5", shape=(1, 28, 28)).state_dict())
    config, lines = adopt(model="lenet5", weights=str(path))
    assert (config.data.normalization, config.data.image_size, lines) == (None, None, [])


def test_names_and_files_that_do_not_exist_or_fit_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="--weights efficientnet-lite9: neither a file nor a known name; did you"):
        adopt(model="efficientnet-lite0", weights="efficientnet-lite9")
    with pytest.raises(ConfigError, match="--weights imagenet: none are known for lenet5; models that have some: eff"):
        adopt(model="lenet5", weights="imagenet")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        adopt(model="lenet5", weights=str(tmp_path / "none.safetensors"))


def test_a_pickled_file_is_converted_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    source, target = build("resnet8-cifar", seed=1), build("resnet8-cifar", seed=2)
    torch.save({"state_dict": source.state_dict()}, tmp_path / "w.pth")
    config = resolve(None, None, {"model": "resnet8-cifar", "weights": str(tmp_path / "w.pth")}).config
    first = find_weights(config, Lines())
    load_pretrained(target, first.path)
    assert same(source, target)
    assert find_weights(config, Lines()).path == first.path


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
