"""Optimizers of the user's code: what is accepted, what a checkpoint stores, and which guarantees are kept."""

from functools import partial

import pytest
import torch
from torch import nn

from convolve import plugins
from convolve.config import OptimConfig
from convolve.errors import CheckpointError, ConfigError
from convolve.optim.optimizers import build_optimizer, count_moments, load_state, parameter_groups, state_tensors
from convolve.optim.probe import try_optimizer
from convolve.optim.user import read_optimizer


class Rule(torch.optim.Optimizer):
    """Plain gradient descent, the base of the others."""

    def __init__(self, groups, lr=0.1):
        super().__init__(groups, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                self.update(weight, self.state[weight], group)

    def update(self, weight, state, group):
        weight.sub_(group["lr"] * weight.grad)


class Factored(Rule):
    """State of another shape than the weight, a number, a flag and nothing."""

    def update(self, weight, state, group):
        state["calls"] = state.get("calls", 0) + 1
        state["decay"] = 0.5 * state.get("decay", 1.0)
        state["odd"] = bool(state["calls"] % 2)
        state["unset"] = None
        rows = state.setdefault("rows", torch.zeros(weight.shape[0]))
        rows.add_(weight.grad.reshape(weight.shape[0], -1).square().mean(1))
        weight.sub_(group["lr"] * weight.grad / (rows.mean() + state["decay"]) * (1 + state["odd"]) * state["calls"])


class Noisy(Rule):
    def update(self, weight, state, group):
        weight.sub_(group["lr"] * (weight.grad + torch.randn_like(weight)))


class GroupCounter(Rule):
    def update(self, weight, state, group):
        group["count"] += 1
        weight.sub_(group["lr"] / group["count"] * weight.grad)


class OwnGenerator(Rule):
    def __init__(self, groups):
        super().__init__(groups)
        self.generator = torch.Generator().manual_seed(0)

    def update(self, weight, state, group):
        weight.sub_(group["lr"] * weight.grad * torch.rand((), generator=self.generator))


class GlobalNorm(Rule):
    def update(self, weight, state, group):
        norm = sum(other.grad.norm() for each in self.param_groups for other in each["params"])
        weight.sub_(group["lr"] * weight.grad / norm)


class Listed(Rule):
    def update(self, weight, state, group):
        state["history"] = [weight.grad]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


def try_on_model(make):
    return try_optimizer(read_optimizer(make), parameter_groups(make_model(), OptimConfig()))


@pytest.mark.parametrize(
    ("make", "resumes", "separable"),
    [
        (torch.optim.NAdam, True, True),
        (partial(torch.optim.AdamW, fused=True), True, True),
        (torch.optim.Adafactor, True, True),
        (Factored, True, True),
        (Noisy, True, False),
        (GroupCounter, False, False),
        (OwnGenerator, False, False),
        (GlobalNorm, True, False),
    ],
)
def test_a_trial_finds_what_an_optimizer_keeps(make, resumes, separable):
    model, weights = make_model(), make_model().state_dict()
    state = torch.get_rng_state()
    trial = try_optimizer(read_optimizer(make), parameter_groups(model, OptimConfig()))
    assert (trial.resumes, trial.separable) == (resumes, separable)
    assert bool(trial.changed) == (make is GroupCounter)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: None, "optimizer .*: cannot be made of parameter groups .TypeError"),
        (lambda groups: 3, "returned int; return a torch.optim.Optimizer"),
        (lambda groups: Rule(groups[:1]), "updates 2 of 6 parameters; pass all groups on"),
        (torch.optim.LBFGS, "cannot be made of parameter groups .ValueError: LBFGS doesn't support per-parameter"),
        (Listed, "keeps a list in state 'history', which checkpoints cannot store; keep tensors and numbers"),
        (5, "optimizer 5: is int; give a torch.optim class or a function of parameter groups"),
        (
            torch.optim.SGD([nn.Parameter(torch.ones(1))]),
            "optimizer SGD: an object holds its parameters; pass the class",
        ),
        ("lyon", "optimizer lyon: unknown name"),
        (
            "no_such_package:lion",
            "--optimizer no_such_package:lion: cannot import no_such_package .ModuleNotFoundError",
        ),
    ],
)
def test_a_wrong_optimizer_is_one_clear_line(make, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        try_on_model(make)
    assert "\n" not in str(caught.value)


def test_a_step_that_needs_a_closure_is_one_clear_line():
    class Closure(Rule):
        def step(self, closure):
            closure()

    with pytest.raises(ConfigError, match=r"Closure: step\(\) failed .TypeError.* without a closure"):
        try_on_model(Closure)


def test_numbers_and_other_shapes_are_stored_by_name():
    model = make_model()
    optimizer = build_optimizer(model, OptimConfig(), given=read_optimizer(Factored))
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    stored = state_tensors(optimizer, model)
    assert {key.removeprefix("0.weight.") for key in stored if key.startswith("0.weight.")} == {
        "calls:int",
        "decay:float",
        "odd:bool",
        "rows",
    }
    twin = build_optimizer(model, OptimConfig(), given=read_optimizer(Factored))
    load_state(twin, model, stored, any_shape=True)
    slots = twin.state[model[0].weight]
    assert (slots["calls"], slots["decay"], slots["odd"]) == (1, 0.5, True) and type(slots["odd"]) is bool
    with pytest.raises(CheckpointError, match=r"0.weight.calls:text' is no number"):
        load_state(twin, model, {"0.weight.calls:text": torch.tensor(1)}, any_shape=True)


def test_a_fused_optimizer_accepts_no_state_of_another_shape():
    model = make_model()
    optimizer = build_optimizer(model, OptimConfig(), given=read_optimizer(partial(torch.optim.AdamW, fused=True)))
    with pytest.raises(CheckpointError, match="has another shape than its weight"):
        load_state(optimizer, model, {"0.weight.exp_avg": torch.zeros(2)}, any_shape=True)


def test_a_plugin_has_the_learning_rate_and_weight_decay_of_the_options(monkeypatch):
    monkeypatch.setattr(plugins.OPTIMIZERS, "_registered", {})
    plugins.OPTIMIZERS.register("rule", Rule, "test")
    plugins.OPTIMIZERS.register("nadam", torch.optim.NAdam, "test")
    groups = build_optimizer(
        make_model(), OptimConfig(optimizer="rule", learning_rate=0.3, weight_decay=0.2)
    ).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.3, 0.2), (0.3, 0.0)]
    assert count_moments(OptimConfig(optimizer="rule")) == (0, 0)
    assert count_moments(OptimConfig(optimizer="nadam")) == (2, 0)


def test_a_name_that_convolve_has_cannot_be_taken(monkeypatch):
    monkeypatch.setattr(plugins.OPTIMIZERS, "_registered", {})
    plugins.OPTIMIZERS.register("adam", torch.optim.Adam, "other.adam")
    with pytest.raises(ConfigError, match="optimizer adam: offered more than once .convolve, other.adam.; rename"):
        build_optimizer(make_model(), OptimConfig(optimizer="adam"))
