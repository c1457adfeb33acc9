import pytest
import torch
from torch import nn

from convolve.config import OptimConfig
from convolve.errors import CheckpointError
from convolve.optim.optimizers import (
    OPTIMIZERS,
    build_optimizer,
    count_moments,
    load_state,
    set_learning_rate,
    state_tensors,
)


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
    return model.to(memory_format=torch.channels_last)


def advance(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        torch.manual_seed(step)
        loss = model(torch.randn(6, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_norms_and_biases_do_not_decay():
    model = make_model()
    decaying, others = build_optimizer(model, OptimConfig(weight_decay=0.1)).param_groups
    assert [p.ndim for p in decaying["params"]] == [4, 2]
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert sum(len(group["params"]) for group in (decaying, others)) == len(list(model.parameters()))


def test_with_weight_decay_on_layers_biases_decay_and_norms_do_not():
    model = make_model()
    decaying, others = build_optimizer(model, OptimConfig(weight_decay=0.1, weight_decay_on="layers")).param_groups
    assert [p.ndim for p in decaying["params"]] == [4, 1, 2, 1]
    assert others["params"] == [model[1].weight, model[1].bias]


def test_every_parameter_decays_with_weight_decay_on_all():
    decaying, others = build_optimizer(make_model(), OptimConfig(weight_decay=0.1, weight_decay_on="all")).param_groups
    assert (len(decaying["params"]), len(others["params"])) == (6, 0)


def test_norms_and_biases_can_have_another_decay():
    config = OptimConfig(weight_decay=0.1, bias_weight_decay=0.3, weight_decay_exclude=("1.",))
    groups = build_optimizer(make_model(), config).param_groups
    decays = {(group["weight_decay"], p.ndim) for group in groups for p in group["params"]}
    assert decays == {(0.1, 4), (0.1, 2), (0.3, 1), (0.0, 1)}


def test_momentum_is_its_formula():
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    holder = nn.ParameterList([weight])
    optimizer = build_optimizer(holder, OptimConfig(optimizer="momentum", momentum=0.5, weight_decay=0.1))
    set_learning_rate(optimizer, 0.1)
    expected, velocity = weight.detach().clone(), torch.zeros(1, 2)
    for gradient in ([[1.0, 2.0]], [[0.5, -1.0]], [[3.0, 0.0]]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        velocity = 0.5 * velocity + torch.tensor(gradient) + 0.1 * expected
        expected = expected - 0.1 * velocity
    assert torch.allclose(weight, expected, atol=1e-7)


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_restored_state_continues_bit_for_bit(rule):
    config = OptimConfig(optimizer=rule, learning_rate=0.01, weight_decay=1e-3)
    model = make_model()
    optimizer = build_optimizer(model, config)
    advance(model, optimizer, 3)
    stored = {name: tensor.contiguous().clone() for name, tensor in state_tensors(optimizer, model).items()}
    twin = make_model(seed=1)
    twin.load_state_dict(model.state_dict())
    twin_optimizer = build_optimizer(twin, config)
    load_state(twin_optimizer, twin, stored)
    advance(model, optimizer, 3, start=3)
    advance(twin, twin_optimizer, 3, start=3)
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_state_of_an_unknown_parameter_is_rejected():
    model = make_model()
    with pytest.raises(CheckpointError, match="unexpected key 'ghost.exp_avg' .1 in total.; restore"):
        load_state(build_optimizer(model, OptimConfig(optimizer="adam")), model, {"ghost.exp_avg": torch.zeros(1)})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rule", list(OPTIMIZERS))
def test_counted_moments_are_those_that_are_stored(rule, momentum):
    """`convolve plan` computes memory with these counts."""
    config = OptimConfig(optimizer=rule, momentum=momentum)
    layer = nn.Conv2d(2, 3, 3)
    optimizer = build_optimizer(layer, config)
    layer(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    slots = {slot for state in optimizer.state.values() for slot, value in state.items()
            if torch.is_tensor(value) and value.ndim}  # fmt: skip
    second = {"exp_avg_sq", "square_avg"}
    assert count_moments(config) == (len(slots - second), len(slots & second))
