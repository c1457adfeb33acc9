"""Sizes, counts, names, norms and options of the large families."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from convolve import rng
from convolve.config.model_options import COMMON_OPTIONS, FAMILIES
from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError
from convolve.layers.blocks import round_width
from convolve.layers.dropout import StochasticDepth
from convolve.layers.norm import ProxyNorm
from convolve.models import registry
from convolve.models.fastnet import Whitening

CIFAR = (3, 32, 32)


def sketch(name, shape=None, classes=None, **options):
    own = registry.resolve(name, ModelConfig(model=name, **options))
    return registry.build_meta(
        name,
        classes=classes or own.classes,
        input_shape=shape or own.input_shape,
        options=ModelConfig(model=name, **options),
    )


def build(name, shape=CIFAR, classes=10, seed=0, **options):
    return registry.build(
        name, classes=classes, input_shape=shape, seed=seed, options=ModelConfig(model=name, **options)
    )


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("resnet10", {"stage1_projection": True}, 5_423_016),
        ("resnet18", {}, 11_689_512),
        ("resnet18", {"stage1_projection": True}, 11_693_736),
        ("resnet34", {}, 21_797_672),
        ("resnet34", {"stage1_projection": True}, 21_801_896),
        ("resnet14", {}, 10_064_936),
        ("resnet26", {}, 15_995_176),
        ("resnet50", {}, 25_557_032),
        ("resnet101", {}, 44_549_160),
        ("resnet152", {}, 60_192_808),
        ("resnet8-cifar", {}, 75_290),
        ("resnet14-cifar", {}, 172_506),
        ("resnet20-cifar", {}, 269_722),
        ("resnet32-cifar", {}, 464_154),
        ("resnet44-cifar", {}, 658_586),
        ("resnet110-cifar", {}, 1_727_962),
        ("resnet11-cifar", {}, 127_642),
        ("resnet29-cifar", {}, 313_114),
        ("resnext", {"model_size": "14"}, 9_411_880),
        ("resnext50-32x4d", {}, 25_028_904),
        ("resnext101-32x4d", {}, 44_177_704),
        ("resnext101-32x8d", {}, 88_791_336),
        ("efficientnet-cifar", {}, 1_077_932),
        ("efficientnet-b0", {}, 5_288_548),
        ("efficientnet-b1", {}, 7_794_184),
        ("efficientnet-b2", {}, 9_109_994),
        ("efficientnet-b3", {}, 12_233_232),
        ("efficientnet-b4", {}, 19_341_616),
        ("efficientnet-b5", {}, 30_389_784),
        ("efficientnet-b6", {}, 43_040_704),
        ("efficientnet-b7", {}, 66_347_960),
        ("efficientnet-b0", {"group_dim": 16, "expand_ratio": 4}, 5_913_796),
        ("efficientnet-b4", {"group_dim": 16, "expand_ratio": 4}, 19_328_168),
        ("efficientnet-b7", {"group_dim": 16, "expand_ratio": 4}, 59_210_264),
        ("mobilenet-v2", {}, 3_504_872),
        ("mobilenet-v3-small", {}, 2_542_856),
        ("mobilenet-v3-large", {}, 5_483_032),
    ],
)
def test_parameter_counts_are_the_published_ones(name, options, parameters):
    assert count(sketch(name, **options)) == parameters


def test_a_fourth_input_channel_adds_one_channel_to_the_stem():
    assert count(sketch("efficientnet-b0", shape=(4, 224, 224))) == 5_288_836
    assert count(sketch("resnext", shape=(4, 224, 224), model_size="14")) == 9_415_016


def test_resnet_has_the_parameter_names_of_torchvision():
    names = set(sketch("resnet50").state_dict())
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.downsample.0.weight", "layer1.0.downsample.1.bias"} <= names
    assert {"layer4.2.conv3.weight", "layer4.2.bn3.num_batches_tracked", "fc.weight", "fc.bias"} <= names
    assert len(names) == 320
    assert len(sketch("resnet18").state_dict()) == 122


def test_efficientnet_has_the_parameter_names_of_torchvision():
    names = set(sketch("efficientnet-b0").state_dict())
    assert {"features.0.0.weight", "features.1.0.block.0.0.weight", "features.1.0.block.1.fc1.bias"} <= names
    assert {"features.7.0.block.3.1.running_var", "features.8.0.weight", "classifier.1.bias"} <= names
    assert len(names) == 360


@pytest.mark.parametrize(("size", "number", "last"), [("v2", 314, "1"), ("v3-small", 244, "3"), ("v3-large", 312, "3")])
def test_mobilenet_has_the_parameter_names_of_torchvision(size, number, last):
    names = set(sketch(f"mobilenet-{size}").state_dict())
    assert {"features.0.0.weight", f"classifier.{last}.weight"} <= names
    assert len(names) == number


def test_a_family_picks_its_model_by_image_size():
    def shapes(network):
        return [tuple(tensor.shape) for tensor in network.state_dict().values()]

    assert shapes(sketch("resnet", CIFAR, model_size="20")) == shapes(sketch("resnet20-cifar", CIFAR))
    assert shapes(sketch("resnet", model_size="50")) == shapes(sketch("resnet50"))
    assert shapes(sketch("resnet", CIFAR, model_size="56")) == shapes(sketch("resnet56b-cifar", CIFAR))
    assert shapes(sketch("efficientnet", model_size="B4")) == shapes(sketch("efficientnet-b4"))
    assert shapes(sketch("efficientnet", model_size="4")) == shapes(sketch("efficientnet-b4"))


def test_names_of_other_libraries_are_understood():
    assert registry.find("efficientnet_b0") is registry.find("efficientnet-b0")
    assert registry.find("resnext50") is registry.find("resnext50_32x4d")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "resnet",
            {"model_size": "19"},
            "known sizes are 10, 14, 18, 26, 34, 50, 101, 152 and, for images of up to 64",
        ),
        ("resnet", {"model_size": "50"}, "images of 32x32: known sizes are 8, 11, 14, 20"),
        ("efficientnet", {"model_size": "b9"}, "known sizes are cifar, b0, b1"),
        ("mobilenet", {"model_size": "v4"}, "known sizes are v2, v3-small, v3-large"),
        (
            "resnet50",
            {"model_size": "18"},
            "--model-size 18: model resnet50 fixes this option; omit it, or use --model resnet",
        ),
        (
            "resnet20-cifar",
            {"expand_ratio": 4},
            "--expand-ratio 4: resnet20-cifar has no such option, only efficientnet; omit it",
        ),
        (
            "lenet5",
            {"norm_type": "group"},
            "--norm-type group: lenet5 has no such option, only resnet, resnext, efficientnet, efficientnet-lite, mob",
        ),
        (
            "resnet20-cifar",
            {"norm_type": "group", "groups": 12},
            "--groups 12: does not divide the 16 channels of a layer",
        ),
        ("resnext29-cifar", {"convolution_groups": 24, "group_dim": 3, "widenet": False}, None),
        ("resnext29-cifar", {"convolution_groups": 7, "group_dim": 4}, None),
        ("efficientnet-cifar", {"proxy_norm": True}, "--proxy-norm with --norm-type batch"),
    ],
)
def test_a_wrong_size_or_option_is_one_clear_line(name, options, message):
    if message is None:
        sketch(name, CIFAR, 10, **options)
        return
    with pytest.raises(ConfigError) as caught:
        registry.build_meta(name, classes=10, input_shape=CIFAR, options=ModelConfig(model=name, **options))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["resnet8-cifar", "resnet11-cifar", "resnext11-cifar", "resnet10", "mobilenet-v3-small"]
)
@pytest.mark.parametrize("norm", ["batch", "group", "layer", "none"])
def test_every_norm_trains(name, norm):
    network = build(name, norm_type=norm, **({"groups": 8} if norm == "group" else {}))
    with rng.at(seed=0, step=0, first=0):
        network(torch.randn(2, *CIFAR)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    layers = list(network.modules())
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in layers) == (norm == "batch")
    assert any(isinstance(layer, nn.GroupNorm) for layer in layers) == (norm in ("group", "layer"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_type": "group", "proxy_norm": True},
        {"se": False, "use_relu": True, "top_width": 0, "dropout_rate": 0.0, "block_survival_prob": 1.0},
        {"group_dim": 8, "expand_ratio": 4, "width_coefficient": 0.25, "depth_coefficient": 0.5, "depth_divisor": 4},
    ],
)
def test_every_option_of_efficientnet_trains(options):
    network = build("efficientnet-cifar", **options)
    with rng.at(seed=0, step=0, first=0):
        network(torch.randn(2, *CIFAR)).square().sum().backward()
    missing = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    assert not missing or all(".0.0." not in name for name in missing)


def test_last_gammas_start_at_zero_in_families_that_define_it():
    large = build("resnet10", classes=3).state_dict()
    small = build("resnet8-cifar").state_dict()
    assert not large["layer2.0.bn2.weight"].any() and (large["layer2.0.bn1.weight"] == 1).all()
    assert (large["layer2.0.downsample.1.weight"] == 1).all()
    assert (small["layer2.0.bn2.weight"] == 1).all()
    assert not build("resnet8-cifar", last_gamma_zero=True).state_dict()["layer2.0.bn2.weight"].any()


def test_v1_strides_in_the_first_convolution():
    def strides(network):
        block = network.blocks["layer2/0"]
        return block.conv1.stride[0], block.conv2.stride[0]

    assert strides(sketch("resnet50")) == (1, 2)
    assert strides(sketch("resnet50", stride_in_1x1=True)) == (2, 1)


def test_padded_shortcuts_have_no_weights():
    network = build("resnet8-cifar")
    shortcut = network.blocks["layer2/0"].downsample
    x = torch.randn(2, 16, 8, 8)
    out = shortcut(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2]) and not out[:, 16:].any() and out.shape[1] == 32
    assert not list(shortcut.parameters())


def test_stochastic_depth_is_keyed_by_sample_and_keeps_the_mean():
    layer = StochasticDepth(0.8, "here")
    ones = torch.ones(4000, 1, 1, 1)
    with rng.at(1, 2, 0):
        whole = layer(ones)
    assert set(whole.unique().tolist()) == {0.0, 1.25}
    assert float(whole.mean()) == pytest.approx(1, abs=0.03)
    with rng.at(1, 2, 1000):
        assert torch.equal(layer(ones[:500]), whole[1000:1500])
    assert torch.equal(layer.eval()(ones), ones)


def test_stochastic_depth_spares_the_first_block_and_grows():
    network = sketch("efficientnet-b0")
    survivals = [module.survival for module in network.modules() if isinstance(module, StochasticDepth)]
    assert survivals == sorted(survivals, reverse=True)
    assert survivals[-1] == pytest.approx(1 - 0.2 * 14 / 16)


def test_proxy_norm_centers_a_gaussian():
    """What a Gaussian z would give is normalized to mean 0 and deviation 1, up to epsilon."""
    norm = nn.GroupNorm(1, 3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 0.5, 2.0]))
        norm.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    layer = ProxyNorm(norm, functional.silu, 1e-6)
    torch.manual_seed(0)
    z = torch.randn(1, 3, 400, 400)
    out = layer(z * norm.weight.view(1, 3, 1, 1) + norm.bias.view(1, 3, 1, 1))
    assert out.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=0.02)
    assert out.std(dim=(0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=0.02)
    assert set(dict(layer.named_parameters())) == {"proxy_beta", "proxy_gamma"}


def test_widths_are_rounded_but_never_much_below():
    assert [round_width(width) for width in (32 * 1.1, 16 * 1.4, 12, 4, 17)] == [32, 24, 16, 8, 16]
    assert all(round_width(width) >= 0.9 * width for width in range(1, 400))


def test_whitening_makes_patches_uncorrelated():
    torch.manual_seed(0)
    images = functional.avg_pool2d(torch.randn(200, 3, 22, 22), 3, stride=1)
    layer = Whitening(3)
    nn.init.zeros_(layer.bias)
    layer.fit_images(images)
    out = layer(images).flatten(2).transpose(1, 2).reshape(-1, 24)[:, :12].double()
    second = out.T @ out / len(out)
    assert torch.allclose(second, torch.diag(second.diagonal()), atol=1e-4)
    assert torch.allclose(second.diagonal(), torch.ones(12, dtype=torch.float64), atol=0.1)
    assert not layer.weight.requires_grad


def test_fastnet_convolutions_start_as_partial_identities():
    weight = build("fastnet").state_dict()["pair2.conv1.weight"]
    x = torch.randn(1, 64, 5, 5)
    assert torch.allclose(functional.conv2d(x, weight[:64], padding=1), x, atol=1e-6)


def test_every_option_of_the_schema_belongs_to_a_family():
    readers = {option for family in FAMILIES.values() for option in family.names()}
    assert set(ModelConfig.model_fields) - readers == set(COMMON_OPTIONS)


def test_blocks_are_named_as_pipelines_split_them():
    assert {"layer2/3", "maxpool", "fc"} <= set(sketch("resnet50").blocks)
    assert {"features/4/0", "avgpool", "classifier/1"} <= set(sketch("efficientnet-b0").blocks)
