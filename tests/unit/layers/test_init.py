from math import sqrt

import pytest
import torch
from torch import Tensor, nn

from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError
from convolve.layers.init import PerLayerInit, glorot_uniform, initialize, kaiming_normal, measure_fans, zeros
from convolve.models import registry
from convolve.models.network import Network

RULE = PerLayerInit(conv=kaiming_normal, linear=glorot_uniform, bias=zeros)
MNIST = (1, 28, 28)


def build(name: str, seed: int = 1) -> Network:
    return registry.build(name, classes=10, input_shape=MNIST, seed=seed, options=ModelConfig())


def check_uniform(values: Tensor, limit: float) -> None:
    assert values.abs().max() <= limit
    if values.numel() > 50:
        assert values.abs().max() > 0.9 * limit
    error = limit / sqrt(3 * values.numel())
    assert abs(values.mean()) < 5 * error
    if values.numel() > 500:
        assert abs(values.var() / (limit**2 / 3) - 1) < 5 * sqrt(0.8 / values.numel())


def test_lenet5_is_initialized_like_torch_layers() -> None:
    network = build("lenet5")
    for layer, fan_in in (("conv1", 25), ("conv2", 150), ("fc1", 400), ("fc2", 120), ("fc3", 84)):
        for kind in ("weight", "bias"):
            check_uniform(network.get_parameter(f"{layer}.{kind}").detach(), 1 / sqrt(fan_in))


def test_lenet_bn_is_initialized_as_in_paddle() -> None:
    state = build("lenet-bn").state_dict()
    for name, fan_in in (("conv1.weight", 25), ("conv2.weight", 500)):
        values = state[name]
        assert abs(values.mean()) < 5 * sqrt(2 / fan_in / values.numel())
        assert abs(values.var() * fan_in / 2 - 1) < 5 * sqrt(2 / values.numel())
    check_uniform(state["fc1.weight"], sqrt(6 / 810))
    assert all(not state[name].any() for name in ("conv1.bias", "conv2.bias", "fc1.bias", "bn1.bias"))
    assert (state["bn1.weight"] == 1).all()


def test_batch_norm_statistics_start_at_zero_and_one() -> None:
    state = build("lenet-bn").state_dict()
    assert torch.equal(state["bn1.running_mean"], torch.zeros(20))
    assert torch.equal(state["bn1.running_var"], torch.ones(20))
    assert state["bn1.num_batches_tracked"] == 0


def test_cnn_wide_is_initialized_as_in_keras() -> None:
    state = build("cnn-wide").state_dict()
    fans = {"conv1": 25 + 800, "conv2": 800 + 800, "fc1": 1568 + 1024, "fc2": 1024 + 10}
    for layer, total in fans.items():
        check_uniform(state[f"{layer}.weight"], sqrt(6 / total))
        assert not state[f"{layer}.bias"].any()


def test_lenet_sigmoid_has_glorot_biases_too() -> None:
    state = build("lenet-sigmoid").state_dict()
    fans = {"conv1": 25 + 150, "conv2": 150 + 400, "fc1": 784 + 120, "fc2": 120 + 84, "fc3": 84 + 10}
    for layer, total in fans.items():
        check_uniform(state[f"{layer}.weight"], sqrt(6 / total))
        bias = state[f"{layer}.bias"]
        assert bias.any()
        check_uniform(bias, sqrt(6 / (2 * len(bias))))


@pytest.mark.parametrize("name", ["lenet5", "lenet-bn", "cnn-wide", "lenet-sigmoid"])
def test_equal_seeds_give_equal_bits_and_others_do_not(name: str) -> None:
    one, again, other = build(name).state_dict(), build(name).state_dict(), build(name, seed=2).state_dict()
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert not any(torch.equal(one[key], other[key]) for key in one if key.endswith("weight") and "bn" not in key)


def test_the_global_generator_neither_matters_nor_moves() -> None:
    torch.manual_seed(1)
    one = build("lenet5").state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two = build("lenet5").state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_stage_fills_its_blocks_with_the_bits_of_the_whole() -> None:
    whole = build("lenet-bn").state_dict()
    sketch = registry.build_meta("lenet-bn", classes=10, input_shape=MNIST, options=ModelConfig())
    names = ["fc1", "conv2", "bn1"]
    stage = Network({name: sketch.blocks[name] for name in names}, input_shape=(20, 12, 12))
    part = registry.find("lenet-bn").materialize(stage, seed=1).state_dict()
    assert len(part) == 9
    assert all(torch.equal(part[key], whole[key]) for key in part)


def test_another_width_elsewhere_does_not_change_a_parameter() -> None:
    ten = build("lenet5").state_dict()
    seven = registry.build("lenet5", classes=7, input_shape=MNIST, seed=1, options=ModelConfig()).state_dict()
    assert all(torch.equal(ten[key], seven[key]) for key in ten if not key.startswith("fc3"))


def test_parameters_of_one_shape_differ() -> None:
    twins = Network({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}, input_shape=(1, 1, 8))
    initialize(twins, 1, RULE)
    assert not torch.equal(twins.get_parameter("a.weight"), twins.get_parameter("b.weight"))


def test_fans_are_those_of_one_group() -> None:
    assert measure_fans(nn.Conv2d(8, 16, 3, groups=4)) == (2 * 9, 4 * 9)
    assert measure_fans(nn.Linear(7, 3)) == (7, 3)


def test_an_unknown_layer_with_parameters_is_named() -> None:
    with pytest.raises(ConfigError, match="parameter act.weight: unknown initialization of PReLU; write an InitRule"):
        initialize(Network({"act": nn.PReLU()}, input_shape=(1, 1, 1)), 1, RULE)


def test_an_uninitialized_buffer_is_named() -> None:
    layer = nn.Identity()
    layer.register_buffer("table", torch.zeros(3))
    with pytest.raises(ConfigError, match="block odd: Identity has buffers and no reset_running_stats"):
        initialize(Network({"odd": layer}, input_shape=(1, 1, 1)), 1, RULE)
