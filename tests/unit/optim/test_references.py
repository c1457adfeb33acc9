"""Optimizers of torch, and Muon, against their formulas in numpy and float64; groups and learning rates."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from convolve.config import OptimConfig
from convolve.optim.optimizers import OPTIMIZERS, build_optimizer, parameter_groups, set_learning_rate, state_tensors
from convolve.optim.update_rules import orthogonalize
from optimizer_steps import run_optimizer

RATES = (0.1, 0.2, 0.05, 0.02)


run = partial(run_optimizer, rates=RATES, seed=3)


def test_sgd_is_its_formula():
    weights, w, gradients = run((3, 4), optimizer="sgd", weight_decay=0.1)
    for rate, g in zip(RATES, gradients, strict=True):
        w = w - rate * (g + 0.1 * w)
    np.testing.assert_allclose(weights, w, rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_applies_the_learning_rate_outside_the_velocity(nesterov):
    weights, w, gradients = run((3, 4), optimizer="momentum", momentum=0.8, nesterov=nesterov, weight_decay=0.1)
    velocity = np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        g = g + 0.1 * w
        velocity = 0.8 * velocity + g
        w = w - rate * (g + 0.8 * velocity if nesterov else velocity)
    np.testing.assert_allclose(weights, w, rtol=1e-12)


@pytest.mark.parametrize("rule", ["adam", "adamw"])
def test_adam_adds_decay_to_the_gradient_and_adamw_to_the_weight(rule):
    options = {"optimizer": rule, "adam_betas": (0.8, 0.95), "optimizer_epsilon": 1e-3, "weight_decay": 0.1}
    weights, w, gradients = run((3, 4), **options)
    first, second = np.zeros_like(w), np.zeros_like(w)
    for step, (rate, g) in enumerate(zip(RATES, gradients, strict=True), start=1):
        if rule == "adam":
            g = g + 0.1 * w
        else:
            w = w * (1 - rate * 0.1)
        first = 0.8 * first + 0.2 * g
        second = 0.95 * second + 0.05 * g**2
        w = w - rate * (first / (1 - 0.8**step)) / (np.sqrt(second / (1 - 0.95**step)) + 1e-3)
    np.testing.assert_allclose(weights, w, rtol=1e-10)


def test_muon_shrinks_convolutions_and_scales_tall_matrices():
    weights, w, gradients = run((8, 2, 1, 1), optimizer="muon", momentum=0.7, weight_decay=0.2, muon_rounds=4)
    velocity = np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        velocity = 0.7 * velocity + g
        direction = torch.from_numpy((g + 0.7 * velocity).reshape(8, 2))
        update = orthogonalize(direction, rounds=4).numpy().reshape(w.shape) * (8 / 2) ** 0.5
        w = w * (1 - rate * 0.2) - rate * update
    np.testing.assert_allclose(weights, w, rtol=1e-10)


def test_muon_trains_other_weights_with_nesterov_momentum_and_a_smaller_rate():
    options = {"optimizer": "muon", "momentum": 0.7, "weight_decay": 0.2, "muon_rest_factor": 0.5}
    weights, w, gradients = run((3, 4), **options)
    velocity = np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        g = g + 0.2 * w
        velocity = 0.7 * velocity + g
        w = w - 0.5 * rate * (g + 0.7 * velocity)
    np.testing.assert_allclose(weights, w, rtol=1e-10)


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_orthogonalizing_does_not_depend_on_the_scale_and_commutes_with_transposing(rows, columns, scale):
    matrix = torch.randn(
        rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(rows * 10 + columns)
    )
    result = orthogonalize(matrix, rounds=5)
    assert result.shape == matrix.shape
    torch.testing.assert_close(orthogonalize(matrix * scale, rounds=5), result, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(orthogonalize(matrix.T, rounds=5).T, result, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_a_learning_rate_of_zero_changes_no_weight(rule):
    layer = nn.Conv2d(2, 3, 3)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    optimizer = build_optimizer(layer, OptimConfig(optimizer=rule, weight_decay=0.1))
    set_learning_rate(optimizer, 0.0)
    layer(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_one_step_lowers_the_loss_along_the_gradient(rule):
    layer = nn.Linear(4, 3)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    optimizer = build_optimizer(layer, OptimConfig(optimizer=rule, learning_rate=1e-3))
    losses = []
    for _ in range(5):
        loss = layer(inputs).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_frozen_parameters_and_those_of_other_processes_are_not_updated(rule):
    model = nn.ModuleDict({"frozen": nn.Linear(3, 3), "other": nn.Linear(3, 3), "local": nn.Linear(3, 3)})
    model["frozen"].requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(optimizer=rule), owns=lambda name: name.startswith("local"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model["local"](model["other"](model["frozen"](torch.ones(1, 3)))).square().sum().backward()
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert changed == {"local.weight", "local.bias"}
    assert {name.split(".")[0] for name in state_tensors(optimizer, model)} <= {"local"}


def test_all_processes_have_the_same_groups():
    """Checkpoints of sharded optimizers are merged by group, so a group exists even where it is empty."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    config = OptimConfig(weight_decay=0.1, bias_weight_decay=0.2, bias_rate_factor=3.0)
    whole = parameter_groups(model, config)
    part = parameter_groups(model, config, owns=lambda name: name == "0.weight")
    keys = [(group["weight_decay"], group["rate_factor"]) for group in whole]
    assert keys == [(group["weight_decay"], group["rate_factor"]) for group in part]
    assert keys == [(0.1, 1.0), (0.0, 1.0), (0.2, 3.0)]
    assert [len(group["params"]) for group in part] == [1, 0, 0]


@settings(deadline=None)
@given(rate=st.floats(0, 10), factor=st.floats(0.01, 100))
def test_the_learning_rate_of_a_group_is_multiplied_by_its_factor(rate, factor):
    optimizer = build_optimizer(nn.Linear(2, 2), OptimConfig(bias_rate_factor=factor))
    set_learning_rate(optimizer, rate)
    rates = {parameter.ndim: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert rates == {2: rate, 1: rate * factor}
