"""Networks whose layers native code computes."""

import copy

import pytest
import torch
from torch import nn

from convolve import rng
from convolve.config.schema import ModelConfig
from convolve.kernels import binding, winograd
from convolve.kernels.build import Unavailable
from convolve.layers.fold import fold_batch_norms
from convolve.layers.native import (
    DepthwiseConv2d,
    NativeBatchNorm2d,
    SameDepthwiseConv2d,
    WinogradConv2d,
    explain_missing,
    use_native_layers,
)
from convolve.models import registry
from convolve.models.network import freeze

pytestmark = pytest.mark.skipif(isinstance(winograd.load(), Unavailable), reason="no native code on this machine")


def build(name="resnet8-cifar"):
    network = registry.build(name, classes=10, input_shape=(3, 32, 32), seed=0, options=ModelConfig(model=name))
    return network.to(memory_format=torch.channels_last)


def images(count=4):
    x = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    return x.contiguous(memory_format=torch.channels_last)


@pytest.fixture
def no_winograd(monkeypatch):
    """A compiler that rejects one of the C files."""
    load = binding.build.load

    def reject(file, options=()):
        return Unavailable("cc: no") if file == "winograd.c" else load(file, options)

    monkeypatch.setattr(binding.build, "load", reject)
    winograd.load.cache_clear()
    yield
    winograd.load.cache_clear()


def test_a_kernel_that_does_not_compile_is_reported_and_leaves_the_others_native(no_winograd):
    network = build()
    names = use_native_layers(network)
    assert "bn1" in names and not any(isinstance(module, WinogradConv2d) for module in network.modules())
    assert explain_missing(network) == "cc: no"


def test_a_kernel_that_no_layer_needs_is_not_missing(no_winograd):
    network = build("lenet-bn")
    assert explain_missing(network) is None and use_native_layers(network)
    assert explain_missing(network) is None


def test_the_rewritten_model_computes_the_same_function():
    plain = build()
    native = copy.deepcopy(plain)
    assert use_native_layers(native)
    outputs = [network(images()) for network in (plain, native)]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    for one, other in zip(plain.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-2, atol=1e-3 * one.grad.abs().max().item())


def test_a_model_with_frozen_statistics_and_the_padding_of_tensorflow_learns_the_same():
    plain = build("efficientnet-lite0").eval()
    native = copy.deepcopy(plain)
    named = use_native_layers(native)
    kinds = {type(native.get_submodule(name)) for name in named}
    assert {SameDepthwiseConv2d, DepthwiseConv2d, NativeBatchNorm2d} <= kinds
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3)).contiguous(
        memory_format=torch.channels_last
    )
    outputs = [network(x) for network in (plain, native)]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-3 * outputs[0].abs().max().item())
    for one, other in zip(plain.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-2, atol=1e-3 * one.grad.abs().max().item())
    folded = fold_batch_norms(native)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(folded(x), outputs[0], rtol=1e-3, atol=1e-3 * outputs[0].abs().max().item())


@pytest.mark.parametrize("name", ["efficientnet-cifar", "mobilenet-v2", "mobilenet-v3-small"])
def test_models_with_depthwise_convolutions_compute_the_same_function(name):
    plain = build(name)
    native = copy.deepcopy(plain)
    named = use_native_layers(native)
    assert any(isinstance(native.get_submodule(one), DepthwiseConv2d) for one in named)
    torch.manual_seed(0)
    x = torch.randn(8, *plain.input_shape).contiguous(memory_format=torch.channels_last)
    with rng.at(seed=0, step=0, first=0):
        outputs = [network(x) for network in (plain, native)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-3 * outputs[0].abs().max().item())


def test_layers_keep_their_names_parameters_and_mode():
    network = build()
    before, parameters = set(network.state_dict()), list(network.parameters())
    network.eval()
    named = use_native_layers(network)
    assert "layer1.0.conv1" in named and "conv1" not in named and "layer2.0.conv1" not in named
    assert set(network.state_dict()) == before
    assert all(one is other for one, other in zip(network.parameters(), parameters, strict=True))
    assert not any(module.training for module in network.modules())


def test_a_second_call_changes_nothing():
    network = build()
    use_native_layers(network)
    before = list(network.modules())
    use_native_layers(network)
    assert all(one is other for one, other in zip(network.modules(), before, strict=True))


def test_frozen_parameters_stay_frozen():
    network = build()
    freeze([network.blocks["layer1/0"]])
    use_native_layers(network)
    assert not network.get_submodule("layer1.0.conv1").weight.requires_grad


def test_copies_and_folded_copies_are_native_too():
    network = build()
    use_native_layers(network)
    for _ in range(3):
        network(images())
    network.eval()
    folded = fold_batch_norms(network)
    assert isinstance(folded.get_submodule("layer1.0.conv1"), WinogradConv2d)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(folded(images()), network(images()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "other", [{"stride": 2}, {"groups": 2}, {"dilation": 2, "padding": 2}, {"padding_mode": "reflect"}]
)
def test_other_convolutions_stay_as_they_are(other):
    conv = nn.Conv2d(16, 16, 3, **{"padding": 1, **other})
    network = build()
    network.get_submodule("layer1.0").conv1 = conv
    use_native_layers(network)
    assert type(conv) is nn.Conv2d


def learn(network):
    output = network(images())
    output.square().sum().backward()
    return [output, *(parameter.grad for parameter in network.parameters())]


def test_a_norm_with_its_relu_has_the_bits_of_the_two_in_turn():
    at_once = build()
    use_native_layers(at_once)
    in_turn, seen = copy.deepcopy(at_once), []
    watched = in_turn.get_submodule("layer1.0.relu")
    watched.register_forward_hook(lambda module, args, output: seen.append(output))
    assert all(torch.equal(*pair) for pair in zip(learn(at_once), learn(in_turn), strict=True))
    assert len(seen) == 1


def test_a_hook_on_a_norm_sees_its_output():
    network, seen = build(), []
    use_native_layers(network)
    norm = network.get_submodule("layer1.0.bn1")
    norm.register_forward_hook(lambda module, args, output: seen.append(output.min().item()))
    network(images())
    assert len(seen) == 1 and seen[0] < 0
