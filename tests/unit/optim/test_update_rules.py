"""Optimizers against references written from their papers, in float64 and numpy."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from convolve.config import OptimConfig
from convolve.errors import ConfigError
from convolve.optim.optimizers import build_optimizer, set_learning_rate
from convolve.optim.update_rules import Muon, orthogonalize
from optimizer_steps import run_optimizer

RATES = (0.1, 0.1, 0.05, 0.02)


run = partial(run_optimizer, rates=RATES, seed=0)


def test_rmsprop_tf_has_epsilon_inside_the_root_and_starts_at_one():
    options = {"optimizer": "rmsprop-tf", "momentum": 0.9, "rmsprop_decay": 0.8, "optimizer_epsilon": 1e-3}
    weights, w, gradients = run((3, 4), weight_decay=0.01, **options)
    square, velocity = np.ones_like(w), np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        g = g + 0.01 * w
        square = 0.8 * square + 0.2 * g**2
        velocity = 0.9 * velocity + rate * g / np.sqrt(square + 1e-3)
        w = w - velocity
    np.testing.assert_allclose(weights, w, rtol=1e-12)


def test_rmsprop_has_epsilon_outside_the_root_and_starts_at_zero():
    options = {"optimizer": "rmsprop", "momentum": 0.9, "rmsprop_decay": 0.8, "optimizer_epsilon": 1e-3}
    weights, w, gradients = run((3, 4), **options)
    square, velocity = np.zeros_like(w), np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        square = 0.8 * square + 0.2 * g**2
        velocity = 0.9 * velocity + g / (np.sqrt(square) + 1e-3)
        w = w - rate * velocity
    np.testing.assert_allclose(weights, w, rtol=1e-12)


def test_lars_is_the_paper_with_decay_once():
    options = {"optimizer": "lars", "momentum": 0.9, "lars_eeta": 0.01, "weight_decay": 0.05, "lars_epsilon": 1e-6}
    weights, w, gradients = run((3, 4), **options)
    velocity = np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        trust = 0.01 * np.linalg.norm(w) / (np.linalg.norm(g) + 0.05 * np.linalg.norm(w) + 1e-6)
        velocity = 0.9 * velocity + rate * trust * (g + 0.05 * w)
        w = w - velocity
    np.testing.assert_allclose(weights, w, rtol=1e-10)


def test_lars_treats_norms_and_biases_plainly():
    weights, w, gradients = run((5,), optimizer="lars", momentum=0.9, weight_decay=0.05)
    velocity = np.zeros_like(w)
    for rate, g in zip(RATES, gradients, strict=True):
        velocity = 0.9 * velocity + rate * g
        w = w - velocity
    np.testing.assert_allclose(weights, w, rtol=1e-12)


def test_lars_takes_a_plain_step_if_a_norm_is_zero():
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = build_optimizer(holder, OptimConfig(optimizer="lars", learning_rate=0.5))
    holder.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(holder.weight.detach(), torch.full((2, 2), -0.5))


def test_muon_moves_convolutions_by_orthogonal_steps():
    weight = nn.Parameter(torch.zeros(8, 3, 3, 3))
    holder = nn.ParameterList([weight])
    optimizer = build_optimizer(holder, OptimConfig(optimizer="muon", learning_rate=1.0))
    torch.manual_seed(0)
    weight.grad = torch.randn(8, 3, 3, 3)
    optimizer.step()
    values = torch.linalg.svdvals(weight.detach().reshape(8, -1))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6)])
def test_orthogonalizing_keeps_singular_vectors(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.T @ orthogonalize(matrix, rounds=5) @ right.T
    assert torch.allclose(inner, torch.diag(inner.diagonal()), atol=1e-9)
    assert torch.allclose(inner.diagonal(), torch.ones(min(shape), dtype=torch.float64), atol=0.35)


def test_names_can_be_kept_from_decaying():
    model = nn.ModuleDict({"head": nn.Linear(3, 2), "body": nn.Linear(3, 3)})
    decaying, others = build_optimizer(
        model, OptimConfig(weight_decay=0.1, weight_decay_exclude=("head",))
    ).param_groups
    assert [tuple(p.shape) for p in decaying["params"]] == [(3, 3)]
    assert len(others["params"]) == 3


def test_biases_can_have_another_learning_rate():
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimConfig(optimizer="momentum", bias_rate_factor=64))
    set_learning_rate(optimizer, 0.5)
    assert {tuple(group["params"][0].shape): group["lr"] for group in optimizer.param_groups if group["params"]} == {
        (2, 3): 0.5,
        (2,): 32.0,
    }


def test_a_model_without_trainable_parameters_is_an_error():
    model = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameters"):
        build_optimizer(model, OptimConfig())


def test_optimizers_are_known_by_the_names_of_the_original_systems():
    names = {
        "SGD": "sgd",
        "RMSprop": "rmsprop-tf",
        "LARS": "lars",
        "rmsprop_tf": "rmsprop-tf",
        "sgd_combined": "momentum",
    }
    assert {name: OptimConfig(optimizer=name).optimizer for name in names} == names


def test_muon_with_a_fixed_norm_starts_each_update_at_it():
    weight = nn.Parameter(torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(0)))
    before = weight.detach().clone()
    weight.grad = torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    group = {"params": [weight], "weight_decay": 0.5, "orthogonal": True}
    Muon([group], lr=0.25, momentum=0.0, rounds=3, fixed_norm=True).step()
    update = orthogonalize(weight.grad.view(6, -1), rounds=3).view_as(before)
    torch.testing.assert_close(weight.detach(), before * 6**0.5 / before.norm() - 0.25 * update)


def test_muon_can_give_the_other_weights_another_momentum():
    config = OptimConfig(optimizer="muon", momentum=0.6, muon_rest_momentum=0.85)
    groups = build_optimizer(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2)), config).param_groups
    momenta = {parameter.ndim: group["momentum"] for group in groups for parameter in group["params"]}
    assert momenta == {4: 0.6, 2: 0.85, 1: 0.85}
