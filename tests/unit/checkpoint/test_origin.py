"""The library that published weights is recognized from names of parameters and files and from timm's config."""

import json

import pytest

from convolve.checkpoint.origin import read_timm_config, recognize
from convolve.checkpoint.weights_table import TENSORFLOW_OPTIONS, WEIGHTS, Preprocessing
from convolve.config.schema import ModelConfig
from convolve.errors import CheckpointError
from convolve.models import registry

PRETRAINED = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "input_size": [3, 224, 224],
    "crop_pct": 0.875,
    "interpolation": "bicubic",
    "license": "apache-2.0",
}


def shapes(model, classes=1000, prefix=""):
    options = ModelConfig(model=model)
    built = registry.build_meta(model, classes=classes, input_shape=(3, 224, 224), options=options)
    return {prefix + name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}


@pytest.mark.parametrize(
    ("model", "epsilon", "decay"),
    [
        ("mobilenet-v3-small", 1e-3, 0.99),
        ("efficientnet-b5", 1e-3, 0.99),
        ("efficientnet-b0", 1e-5, 0.9),
        ("mobilenet-v2", 1e-5, 0.9),
    ],
)
def test_torchvision_is_recognized_with_its_epsilons(tmp_path, model, epsilon, decay):
    origin = recognize(tmp_path / "w.pth", shapes(model), model, 240)
    assert origin.library == "torchvision"
    assert (origin.model_options["norm_epsilon"], origin.model_options["bn_decay"]) == (epsilon, decay)
    assert origin.preprocessing == Preprocessing("imagenet", 240, 0.875, "bilinear")


def test_resnets_of_torchvision_and_timm_are_the_same(tmp_path):
    origin = recognize(tmp_path / "w.pth", shapes("resnet18", prefix="module."), "resnet18", 224)
    assert origin.library == "torchvision or timm"
    assert (origin.model_options["norm_epsilon"], origin.model_options["stride_in_1x1"]) == (1e-5, False)
    assert origin.preprocessing is not None


@pytest.mark.parametrize(
    ("stem", "file", "model", "library", "epsilon", "normalization"),
    [
        ("conv_stem", "efficientnet_b7.bin", "efficientnet-b7", "timm", 1e-5, "imagenet"),
        ("conv_stem", "tf_efficientnet_b7.bin", "efficientnet-b7", "timm", 1e-3, "imagenet"),
        ("conv_stem", "tf_efficientnet_lite3.bin", "efficientnet-lite3", "timm", 1e-3, "symmetric"),
        ("_conv_stem", "w.bin", "efficientnet-lite0", "TensorFlow port", 1e-3, "symmetric"),
        ("_conv_stem", "w.bin", "efficientnet-b0", "TensorFlow port", 1e-3, "imagenet"),
    ],
)
def test_timm_and_ports_differ(tmp_path, stem, file, model, library, epsilon, normalization):
    tensors = {f"{stem}.weight": (32, 3, 3, 3), "classifier.weight": (1000, 1280)}
    origin = recognize(tmp_path / file, tensors, model, 224)
    assert (origin.library, origin.model_options["norm_epsilon"]) == (library, epsilon)
    assert origin.model_options["conv_padding"] == ("same" if epsilon == 1e-3 else "symmetric")
    assert origin.preprocessing.normalization == normalization


def test_only_a_thousand_classes_are_imagenet(tmp_path):
    origin = recognize(tmp_path / "w.pth", shapes("resnet18", classes=5), "resnet18", 224)
    assert (origin.library, origin.preprocessing) == ("torchvision or timm", None)


def test_other_names_have_no_origin(tmp_path):
    assert recognize(tmp_path / "w.pth", {"encoder.weight": (1000, 3)}, "resnet18", 224).library == "unknown"


def test_a_published_file_has_the_settings_of_the_table(tmp_path):
    info = WEIGHTS["torchvision:resnet50.v2"]
    origin = recognize(tmp_path / info.source.file, {}, "resnet50", 224)
    assert (origin.preprocessing, origin.license) == (info.preprocessing, info.license)


def test_a_config_of_timm_beside_the_file_decides(tmp_path):
    pretrained = {**PRETRAINED, "mean": [0.5] * 3, "std": [0.5] * 3}
    config = {"architecture": "tf_efficientnet_b0", "pretrained_cfg": pretrained}
    (tmp_path / "config.json").write_text(json.dumps(config))
    origin = recognize(tmp_path / "model.safetensors", {}, "efficientnet-b0", 224)
    assert origin.model_options == TENSORFLOW_OPTIONS
    assert origin.preprocessing == Preprocessing("symmetric", 224, 0.875, "bicubic")
    assert origin.license == "apache-2.0"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "not a config of timm"),
        ('{"architecture": "resnet18"}', "not a config of timm"),
        (json.dumps({"architecture": "x", "pretrained_cfg": {**PRETRAINED, "mean": [0.4] * 3}}), "not supported"),
        (json.dumps({"architecture": "x", "pretrained_cfg": {**PRETRAINED, "crop_pct": 7}}), "not supported"),
    ],
)
def test_other_configs_are_rejected_in_one_line(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_timm_config(tmp_path / "config.json")
    assert "\n" not in str(caught.value)
