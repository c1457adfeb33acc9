"""Forward passes against plain reference code, and against torchvision and timm where they are installed."""

import pytest
import torch
from torch.nn import functional

from convolve.checkpoint.naming import convert_state_dict
from convolve.config.schema import ModelConfig
from convolve.models import registry
from convolve.models.foreign import import_library

TOLERANCE = 1e-4


def library(name):
    try:
        return import_library(name)
    except ModuleNotFoundError:
        pytest.skip(f"{name} is not installed")


def build(name, shape, classes=1000):
    network = registry.build(name, classes=classes, input_shape=shape, seed=3, options=ModelConfig(model=name))
    torch.manual_seed(0)
    for key, tensor in network.state_dict().items():
        # Statistics and gammas that differ from one another show which norm was used where.
        if key.endswith(("running_mean", "running_var")) or ("bn" in key and key.endswith("weight")):
            tensor.uniform_(0.5, 1.5)
    return network.eval()


def norm(state, name, x):
    mean, var, weight, bias = (state[f"{name}.{key}"] for key in ("running_mean", "running_var", "weight", "bias"))
    return functional.batch_norm(x, mean, var, weight, bias, eps=1e-5)


def conv(state, name, x, stride=1, groups=1):
    weight = state[f"{name}.weight"]
    padding = weight.shape[-1] // 2
    return functional.conv2d(x, weight, state.get(f"{name}.bias"), stride, padding, groups=groups)


def run_resnet(state, x, depths, bottleneck):
    x = functional.relu(norm(state, "bn1", conv(state, "conv1", x, 2)))
    x = functional.max_pool2d(x, 3, 2, 1)
    for stage, depth in enumerate(depths, start=1):
        for index in range(depth):
            name, stride = f"layer{stage}.{index}", 2 if stage > 1 and index == 0 else 1
            strides = (1, stride, 1) if bottleneck else (stride, 1)
            out = x
            for number, step in enumerate(strides, start=1):
                out = norm(state, f"{name}.bn{number}", conv(state, f"{name}.conv{number}", out, step))
                out = functional.relu(out) if number < len(strides) else out
            if f"{name}.downsample.0.weight" in state:
                x = norm(state, f"{name}.downsample.1", conv(state, f"{name}.downsample.0", x, stride))
            x = functional.relu(out + x)
    return functional.linear(x.mean(dim=(2, 3)), state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize(
    ("name", "depths", "bottleneck"), [("resnet18", (2, 2, 2, 2), False), ("resnet26", (2, 2, 2, 2), True)]
)
def test_resnet_equals_a_plain_reference(name, depths, bottleneck):
    network = build(name, (3, 64, 64))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(network(x), run_resnet(network.state_dict(), x, depths, bottleneck), rtol=1e-4, atol=1e-4)


def run_efficientnet(state, x):
    def layer(name, x, stride=1, groups=1, act=True):
        x = norm(state, f"{name}.1", conv(state, f"{name}.0", x, stride, groups))
        return functional.silu(x) if act else x

    x = layer("features.0", x, 2)
    for stage, (repeats, stride) in enumerate(((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1)), start=1):
        for index in range(repeats):
            name, step = f"features.{stage}.{index}.block", stride if index == 0 else 1
            at = 0 if stage == 1 else 1
            out = x if stage == 1 else layer(f"{name}.0", x)
            out = layer(f"{name}.{at}", out, step, groups=out.shape[1])
            gate = functional.silu(conv(state, f"{name}.{at + 1}.fc1", out.mean(dim=(2, 3), keepdim=True)))
            out = out * torch.sigmoid(conv(state, f"{name}.{at + 1}.fc2", gate))
            out = layer(f"{name}.{at + 2}", out, act=False)
            x = out + x if step == 1 and out.shape == x.shape else out
    x = layer("features.8", x).mean(dim=(2, 3))
    return functional.linear(x, state["classifier.1.weight"], state["classifier.1.bias"])


def test_efficientnet_equals_a_plain_reference():
    network = build("efficientnet-b0", (3, 64, 64))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        ours, reference = network(x), run_efficientnet(network.state_dict(), x)
    assert torch.allclose(ours, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("resnet18", "resnet18"),
        ("resnet50", "resnet50"),
        ("resnext50-32x4d", "resnext50_32x4d"),
        ("efficientnet-b0", "efficientnet_b0"),
        ("mobilenet-v2", "mobilenet_v2"),
        ("mobilenet-v3-small", "mobilenet_v3_small"),
        ("mobilenet-v3-large", "mobilenet_v3_large"),
    ],
)
def test_forward_equals_torchvision(name, theirs):
    other = library("torchvision").models.get_model(theirs, weights=None).eval()
    network = build(name, (3, 96, 96))
    network.load_state_dict(other.state_dict())
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        assert torch.allclose(network(x), other(x), atol=TOLERANCE)


@pytest.mark.parametrize(("name", "theirs"), [("efficientnet-b0", "efficientnet_b0"), ("resnet50", "resnet50")])
def test_forward_equals_timm(name, theirs):
    other = library("timm").create_model(theirs, pretrained=False).eval()
    network = build(name, (3, 96, 96))
    network.load_state_dict(convert_state_dict(other.state_dict(), network.state_dict()))
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        assert torch.allclose(network(x), other(x), atol=TOLERANCE)


@pytest.mark.parametrize("name", ["torchvision:squeezenet1_1", "torchvision:mobilenet_v3_small", "timm:resnet10t"])
@pytest.mark.parametrize("channels", [1, 4, 13])
def test_models_of_other_libraries_take_any_number_of_channels(name, channels):
    library(name.partition(":")[0])
    network = build(name, (channels, 64, 64), classes=5)
    with torch.no_grad():
        assert network(torch.randn(2, channels, 64, 64)).shape == (2, 5)
