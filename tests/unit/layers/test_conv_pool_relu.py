"""Networks whose convolutions, pools and ReLUs are one native operation compute what they computed before."""

from copy import deepcopy

import pytest
import torch
from torch import fx, nn

from convolve import rng
from convolve.config import ModelConfig
from convolve.kernels import conv_pool
from convolve.kernels.build import Unavailable
from convolve.layers.fold import fold_batch_norms
from convolve.layers.native import ChainSequential, ConvPoolReLU, use_native_layers
from convolve.models import registry
from convolve.models.network import freeze, recompute, subnetwork
from convolve.models.summary import summarize
from convolve.models.timing import BlockTime, time_blocks

pytestmark = pytest.mark.skipif(isinstance(conv_pool.load(), Unavailable), reason="no native code on this machine")

AFTER = ["bn1", "conv2", "pool2", "act2", "flatten", "fc1"]
BOTH = ["conv1", "pool1", "act1", "conv2", "pool2", "act2"]


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the inputs that the native operation was called with."""
    seen, kernel = [], conv_pool.load()

    def record(sizes, *arguments):
        count, height, width, channels = sizes[:4]
        seen.append((count, channels, height, width))
        return kernel.forward(sizes, *arguments)

    recording = kernel._replace(forward=record)
    monkeypatch.setattr(conv_pool, "load", lambda: recording)
    return seen


def make(model="lenet-bn", side=28):
    options = ModelConfig(model=model)
    network = registry.build(model, classes=10, input_shape=(1, side, side), seed=0, options=options)
    return network.to(memory_format=torch.channels_last).train()


def fuse(network):
    """The names of the blocks that are fused."""
    return [name for name in use_native_layers(network) if name in BOTH]


def images(count=6, side=28):
    return torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(0))


def learn(network, x):
    network.zero_grad()
    with rng.at(seed=0, step=0, first=0):
        y = network(x)
    y.square().mean().backward()
    return {"y": y.detach(), **{name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}}


def assert_close(one, other, tolerance=1e-5):
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name] - other[name]).norm() <= tolerance * other[name].norm(), name


def assert_equal(one, other):
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(("model", "side"), [("lenet5", 28), ("lenet-bn", 28), ("lenet-bn", 31), ("cnn-wide", 27)])
def test_a_fused_model_has_the_outputs_and_gradients_of_its_layers(model, side, calls):
    plain, fused = make(model, side), make(model, side)
    assert fuse(fused) == BOTH
    assert_close(learn(fused, images(side=side)), learn(plain, images(side=side)))
    assert len(calls) == 2


def test_sigmoids_and_models_without_such_pools_are_unchanged(calls):
    for model in ("lenet-sigmoid", "resnet8-cifar"):
        network = make(model)
        use_native_layers(network)
        network.eval()(images())
    assert calls == []


@pytest.mark.parametrize(
    ("conv", "pool", "act"),
    [
        (nn.Conv2d(1, 2, 3, stride=2), nn.MaxPool2d(2), nn.ReLU()),
        (nn.Conv2d(2, 2, 3, groups=2), nn.MaxPool2d(2), nn.ReLU()),
        (nn.Conv2d(1, 2, 3, dilation=2), nn.MaxPool2d(2), nn.ReLU()),
        (nn.Conv2d(1, 2, 3, padding="same"), nn.MaxPool2d(2), nn.ReLU()),
        (nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.MaxPool2d(2), nn.ReLU()),
        (nn.Conv2d(1, 2, 3), nn.MaxPool2d(3), nn.ReLU()),
        (nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, stride=1), nn.ReLU()),
        (nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, padding=1), nn.ReLU()),
        (nn.Conv2d(1, 2, 3), nn.AvgPool2d(2), nn.ReLU()),
        (nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU6()),
    ],
)
def test_layers_that_compute_something_else_are_left_alone(conv, pool, act):
    use_native_layers(nn.Sequential(conv, pool, act))
    assert not isinstance(conv, ConvPoolReLU)


def test_a_plain_sequential_is_fused_and_keeps_its_names(calls):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten())
    fused = deepcopy(plain)
    assert use_native_layers(fused) == ["0", "1", "2"] and isinstance(fused, ChainSequential)
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert_close(learn(fused, images()), learn(plain, images()))
    assert len(calls) == 1


def test_names_parameters_and_the_table_of_blocks_stay_as_they_are():
    plain, fused = make(), make()
    fuse(fused)
    assert list(fused.state_dict()) == list(plain.state_dict()) and list(fused.blocks) == list(plain.blocks)
    assert summarize("lenet-bn", fused) == summarize("lenet-bn", plain)


def test_the_same_fused_pass_has_the_same_bits_again():
    network = make()
    fuse(network)
    assert_equal(learn(network, images()), learn(network, images()))


def test_a_hook_on_a_block_sees_what_passes_and_the_others_stay_fused(calls):
    network = make()
    fuse(network)
    seen = []
    handle = network.blocks["pool1"].register_forward_hook(lambda module, given, out: seen.append(out.shape))
    network(images())
    assert [tuple(shape) for shape in seen] == [(6, 20, 12, 12)]
    assert calls == [(6, 20, 12, 12)]
    handle.remove()
    network(images())
    assert calls[1:] == [(6, 1, 28, 28), (6, 20, 12, 12)]


def test_a_hook_on_the_gradient_of_a_block_is_called_too(calls):
    network = make()
    fuse(network)
    seen = []
    network.blocks["act2"].register_full_backward_hook(lambda module, given, out: seen.append(out[0].shape))
    learn(network, images())
    assert [tuple(shape) for shape in seen] == [(6, 50, 4, 4)] and calls == [(6, 1, 28, 28)]


def test_a_copy_computes_with_the_copied_weights(calls):
    network = make()
    fuse(network)
    copy = deepcopy(network)
    with torch.no_grad():
        copy.blocks["conv1"].weight.zero_()
        assert not copy(images()).equal(network(images()))
    assert len(calls) == 4


@pytest.mark.parametrize("order", ["before", "after"])
def test_stages_of_a_model_have_the_bits_of_the_whole(order, calls):
    whole = make()
    fuse(whole)
    network = make()
    if order == "before":
        fuse(network)
    first, second = (
        subnetwork(network, ["conv1", "pool1", "act1"], (1, 28, 28)),
        subnetwork(network, AFTER, (20, 12, 12)),
    )
    if order == "after":
        assert fuse(first) == BOTH[:3] and fuse(second) == BOTH[3:]
    assert second(first(images())).equal(whole(images()))
    assert len(calls) == 4


def test_a_model_is_never_split_inside_a_block_group():
    assert make().split_points == ["conv1", "bn1", "conv2", "flatten", "fc1"]
    assert make("lenet-sigmoid").split_points == list(make("lenet-sigmoid").blocks)


def test_recomputation_has_the_same_bits_and_runs_fused_groups(calls):
    network = make("cnn-wide")
    recompute(network, ["act1", "fc1"])
    assert fuse(network) == BOTH
    again = learn(network, images())
    assert len(calls) == 4
    kept = make("cnn-wide")
    fuse(kept)
    assert_equal(again, learn(kept, images()))


@pytest.mark.parametrize("kept", [["conv1", "act2"], ["pool1", "conv2"], ["*"], []])
def test_an_activation_inside_a_group_is_kept_after_it(kept, calls):
    plain = make()
    fuse(plain)
    network = make()
    fuse(network)
    recompute(network, kept)
    assert_equal(learn(network, images()), learn(plain, images()))
    assert len(calls) == 6


def test_folded_norms_give_the_same_function_and_stay_fused(calls):
    network = make().eval()
    fuse(network)
    folded = fold_batch_norms(network)
    assert isinstance(folded.blocks["bn1"], nn.Identity)
    with torch.inference_mode():
        assert_close({"y": folded(images())}, {"y": make().eval()(images())})
    assert len(calls) == 2


def test_graphs_show_the_layers(calls):
    network = make("lenet5").eval()
    fuse(network)
    traced = fx.symbolic_trace(network)
    pools = [node.target for node in traced.graph.nodes if node.op == "call_module" and "pool" in str(node.target)]
    assert pools == ["pool1", "pool2"]
    exported = torch.export.export(network, (images(2),))
    assert any("max_pool2d" in str(node.target) for node in exported.graph.nodes)
    assert calls == []


def test_other_formats_go_through_the_layers(calls):
    network = make("lenet5")
    fuse(network)
    network.double()(images().double())
    with torch.device("meta"):
        network.to_empty(device="meta")(torch.empty(2, 1, 28, 28, dtype=torch.float64))
    assert calls == []


def test_shapes_that_do_not_fit_are_rejected_by_the_layers(calls):
    network = make()
    fuse(network)
    with pytest.raises(RuntimeError, match="Output size is too small"):
        network(torch.zeros(2, 1, 5, 5))
    with pytest.raises(RuntimeError, match="to have 1 channels"):
        network(torch.zeros(2, 3, 28, 28))
    assert calls == []


def test_a_frozen_convolution_gets_no_gradient_and_hands_none_on():
    network = make()
    freeze([network.blocks["conv1"]])
    fuse(network)
    found = learn(network, images())
    plain = make()
    freeze([plain.blocks["conv1"]])
    assert "conv1.weight" not in found
    assert_close(found, learn(plain, images()))


def test_the_time_of_a_group_counts_to_its_first_block():
    network = make()
    fuse(network)
    times = dict(zip(network.blocks, time_blocks(network, samples=4, seconds=0.01).blocks, strict=True))
    assert times["conv1"].forward > 0 and times["conv2"].backward > 0
    assert all(times[name] == BlockTime(0.0, 0.0) for name in ("pool1", "act1", "pool2", "act2"))


def test_fusing_again_changes_nothing():
    network = make()
    assert fuse(network) == BOTH
    before = {name: type(block) for name, block in network.blocks.items()}
    assert fuse(network) == BOTH
    assert {name: type(block) for name, block in network.blocks.items()} == before
    assert [list(group) for group in network.block_groups] == [BOTH[:3], ["bn1"], BOTH[3:], ["flatten"], ["fc1"]]
