"""The running average of the weights, and weights that are replaced for a while."""

import pytest
import torch
from torch import nn

from convolve.engine.ema import ModelEMA, NoEMA, temporary_weights
from convolve.errors import CheckpointError


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def fill(model, value):
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_the_decay_grows_to_its_limit(decay):
    model = make_model()
    fill(model, 1.0)
    average, expected = ModelEMA(model, decay), 1.0
    for step in range(40):
        fill(model, 2.0 + step)
        average.update(model, step)
        d = min(decay, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * (2.0 + step)
        assert average.tensors()["0.weight"][0, 0].item() == pytest.approx(expected, rel=1e-5)


def test_statistics_are_averaged_and_counters_are_not():
    names = set(ModelEMA(make_model(), 0.9).tensors())
    assert {"0.weight", "0.bias", "1.running_mean", "1.running_var"} <= names
    assert "1.num_batches_tracked" not in names


def test_an_average_does_not_share_memory_with_the_weights():
    model = make_model()
    average = ModelEMA(model, 0.9)
    before = {name: tensor.clone() for name, tensor in average.tensors().items()}
    fill(model, 7.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in average.tensors().items())


def test_a_restored_average_continues_with_the_same_bits():
    model = make_model()
    one, other = ModelEMA(model, 0.9), ModelEMA(make_model(), 0.9)
    for step in range(3):
        fill(model, float(step))
        one.update(model, step)
    other.restore({name: tensor.clone() for name, tensor in one.tensors().items()})
    fill(model, 5.0)
    one.update(model, 3)
    other.update(model, 3)
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_an_average_of_another_model_is_rejected_and_changes_nothing(change):
    average = ModelEMA(make_model(), 0.9)
    before = {name: tensor.clone() for name, tensor in average.tensors().items()}
    stored = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    if change == "missing":
        del stored["0.bias"]
    else:
        stored["0.bias2"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match="averages.safetensors: '0.bias2?' does not fit the model"):
        average.restore(stored)
    assert all(torch.equal(before[name], tensor) for name, tensor in average.tensors().items())


def test_without_an_average_nothing_is_stored():
    average = NoEMA()
    average.update(make_model(), 0)
    average.restore({"0.weight": torch.zeros(2, 3)})
    assert average.tensors() == {}


def test_replaced_weights_come_back_bit_for_bit_even_after_an_error():
    model = make_model()
    model[0].weight.data[0, 0] = torch.nan
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KeyError), temporary_weights(model, {"0.weight": torch.full((2, 3), 4.0)}):
        assert (model[0].weight == 4.0).all() and torch.equal(model[0].bias, before["0.bias"])
        raise KeyError
    for name, tensor in model.state_dict().items():
        assert tensor.numpy().tobytes() == before[name].numpy().tobytes()
