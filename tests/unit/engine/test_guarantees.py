"""Every lost guarantee is reported once in one line, and a neighbor that keeps it is not."""

import json
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from convolve.engine.guarantees import probe_loss, probe_module
from convolve.engine.user_code import UserCode
from convolve.errors import ConfigError, GuaranteeError, GuaranteeWarning
from convolve.loggers.base import SilentConsole
from convolve.models.adopt import adopt_model
from convolve.models.user import UserModel
from convolve.runs import session
from digit_runs import digits_config

SHAPE = (1, 12, 12)
IMAGES = torch.rand(8, *SHAPE, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A small classifier; `middle` is what is probed."""

    def __init__(self, middle=None, layer=None):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.layer, self.fc = nn.Conv2d(1, 4, 3, 3), layer or nn.Identity(), nn.Linear(64, 10)
        self.middle = middle or (lambda net, x: x)

    def forward(self, x):
        return self.fc(self.middle(self, self.layer(self.conv(x))).flatten(1))


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.draws = np.random.default_rng(0)

    def forward(self, x):
        return x * float(self.draws.uniform(0.5, 1)) if self.training else x


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return x


def probe(module, **options):
    model = adopt_model(module, input_shape=SHAPE, classes=10, subject="model Net")
    return probe_module(model, IMAGES, digits_config("unused", **options))


OFFENDERS = {
    "dropout function": (
        Net(lambda net, x: functional.dropout(x, 0.5, net.training)),
        "model Net: draws from torch's generator in forward, so --batch-size changes the result",
        ("batch size",),
    ),
    "python's generator": (
        Net(lambda net, x: x * random.random() if net.training else x),
        "model Net: draws from Python's generator",
        ("batch size",),
    ),
    "numpy's generator": (
        Net(lambda net, x: x * float(np.random.rand()) if net.training else x),
        "model Net: draws from numpy's generator",
        ("batch size",),
    ),
    "its own generator": (
        Net(layer=OwnGenerator()),
        "model Net: returns different outputs for the same micro batch, so a resumed run will not be bit-identical",
        ("restart", "processes", "batch size"),
    ),
    "instance norm": (
        Net(layer=nn.InstanceNorm2d(4, track_running_stats=True)),
        r"Net.layer \(InstanceNorm2d\): updates its buffer 'running_mean' in every micro batch, not once per step",
        ("batch size", "norms"),
    ),
    "counter": (
        Net(layer=Counter()),
        "Net.layer.steps: changes in forward and is not saved, so a resumed run will not be bit-identical",
        ("restart", "processes"),
    ),
    "batch mean": (
        Net(lambda net, x: x - x.mean(0, keepdim=True)),
        "model Net: its output for an image depends on the other images of the batch",
        ("batch size",),
    ),
    "batch mean in training": (
        Net(lambda net, x: x - x.mean(0, keepdim=True) if net.training else x),
        "model Net: its output for an image depends on the other images of the batch",
        ("batch size",),
    ),
    "norm without statistics": (
        Net(layer=nn.BatchNorm2d(4, track_running_stats=False)),
        "model Net: its output for an image depends on the other images of the batch",
        ("batch size",),
    ),
}
INNOCENT = {
    "plain": Net(),
    "dropout": Net(layer=nn.Dropout(0.5)),
    "channel dropout": Net(layer=nn.Dropout2d(0.5)),
    "batch norm": Net(layer=nn.BatchNorm2d(4)),
    "group norm": Net(layer=nn.GroupNorm(2, 4)),
    "instance norm": Net(layer=nn.InstanceNorm2d(4)),
    "control flow on shapes": Net(lambda net, x: x if x.shape[2] > 1 else x * 2),
    "control flow on a sample": Net(lambda net, x: torch.stack([row * 2 if row.sum() > 0 else row for row in x])),
}


@pytest.mark.parametrize("name", OFFENDERS)
def test_each_lost_guarantee_is_said_once_in_one_line(name):
    module, message, lost = OFFENDERS[name]
    found = probe(module)
    assert len(found) == 1
    assert found[0].lost == lost
    with pytest.raises(ConfigError, match=message) as caught:
        raise ConfigError(found[0].message)
    assert "\n" not in str(caught.value) and "; " in str(caught.value)


@pytest.mark.parametrize("name", INNOCENT)
def test_modules_that_keep_all_guarantees_are_not_warned_about(name):
    assert probe(INNOCENT[name]) == []


def test_probing_leaves_the_module_and_the_generators_as_they_were():
    module = Net(layer=nn.BatchNorm2d(4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    probe(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_statistics_of_a_replica_are_rejected():
    with pytest.raises(ConfigError, match=r"--replicas 2: Net.layer \(InstanceNorm2d\) updates its buffer"):
        probe(Net(layer=nn.InstanceNorm2d(4, track_running_stats=True)), replicas=2)


def test_a_scalar_loss_must_be_the_mean_over_its_samples():
    logits, labels = torch.randn(8, 10, generator=torch.Generator().manual_seed(0)), torch.arange(8)

    def largest(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none").max()

    assert probe_loss(functional.cross_entropy, logits, labels) == []
    assert probe_loss(lambda outputs, targets: outputs.sum(1), logits, labels) == []
    (lost,) = probe_loss(largest, logits, labels)
    assert "largest: returns one number that is not the mean over its samples" in lost.message


def train(folder, strict):
    config = digits_config(folder, iterations=2, epochs=None, batch_size=8, validation_mode="none", report=False)
    user = UserCode(module=UserModel(Drops), strict=strict)
    return session.train(config, SilentConsole(), user)


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(784, 10)

    def forward(self, x):
        return self.fc(functional.dropout(x.flatten(1), 0.5, self.training))


def test_a_run_warns_once_and_records_what_is_lost(tmp_path):
    with pytest.warns(GuaranteeWarning, match="model Drops: draws from torch's generator") as caught:
        report = train(tmp_path / "run", strict=False)
    assert len(caught) == 1
    events = [json.loads(line) for line in (report.run_dir / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "lost_guarantee"]
    summary = json.loads((report.run_dir / "summary.json").read_text())
    assert summary["lost_guarantees"][0]["message"] == event["message"]
    assert event["lost"] == ["batch size"]


def test_a_strict_run_ends_with_the_line(tmp_path):
    with warnings.catch_warnings(), pytest.raises(GuaranteeError, match="model Drops: draws from torch's generator"):
        train(tmp_path / "run", strict=True)
