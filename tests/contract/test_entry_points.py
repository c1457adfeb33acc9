"""An installed package offers one plugin of every kind through entry points, used by name in Python and in commands."""

import subprocess
import sys

import pytest

import convolve
from convolve.cli.main import dispatch
from digit_runs import weights_hash
from user_plugins import forget

KINDS = ("models", "datasets", "losses", "metrics", "optimizers", "augmentations", "callbacks", "schedules")
CODE = """
from pathlib import Path

import numpy as np
import torch
from torch import nn

import convolve


class Net(nn.Sequential):
    def __init__(self, classes, channels):
        super().__init__(nn.Conv2d(channels, 4, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.append(nn.Linear(64, classes))


class Rows:
    classes = ("top", "bottom")

    def __len__(self):
        return 40

    def __getitem__(self, index):
        pixels = np.zeros((28, 28), np.uint8)
        pixels[5 + 16 * (index % 2)] = 200
        return pixels, index % 2


def open_rows():
    return Rows(), Rows()


def loss(outputs, targets):
    return nn.functional.multi_margin_loss(outputs, targets, reduction="none")


def sure(outputs, targets):
    return outputs.softmax(1).amax(1) > 0.5


def optimizer(groups, lr):
    return torch.optim.NAdam(groups, lr=lr)


def augment(image, rng):
    return image.roll(int(rng.integers(0, 3)), 2)


class Log(convolve.Callback):
    def on_end(self, run):
        (run.path / "callback.txt").write_text("called")


def schedule(config, peak, span):
    return lambda samples: peak / (1 + samples)
"""
OBJECTS = ("Net", "open_rows", "loss", "sure", "optimizer", "augment", "Log", "schedule")
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0"
"""
FLAGS = [
    *("--model", "tiny-net", "--dataset", "tiny-rows", "--loss", "tiny-loss", "--metrics", "tiny-metric"),
    *("--optimizer", "tiny-optimizer", "--augment", "tiny-augmentation", "--callbacks", "tiny-callback"),
    *("--lr-schedule", "tiny-schedule"),
]
NAMES = [
    f"tiny-{kind}" for kind in ("net", "rows", "loss", "metric", "optimizer", "augmentation", "callback", "schedule")
]
QUICK = ["--iterations", "3", "--batch-size", "8", "--threads", "1", "--no-report", "--no-curves", "--strict"]


def install(folder, name, code):
    """Build a package with pip and install it into a new folder."""
    source = folder / "source"
    (source / name).mkdir(parents=True)
    (source / name / "__init__.py").write_text(code)
    groups = [
        f'[project.entry-points."convolve.{kind}"]\n{entry} = "{name}:{value}"\n'
        for kind, entry, value in zip(KINDS, NAMES, OBJECTS, strict=True)
    ]
    (source / "pyproject.toml").write_text(PROJECT.format(name=name) + "\n".join(groups))
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, "--target", folder / "installed", source], check=True
    )
    return folder / "installed"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling builds the package of this test")
    return install(tmp_path_factory.mktemp("package"), "tiny_plugins", CODE)


@pytest.fixture
def folder(installed, tmp_path, monkeypatch):
    forget(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(installed)
    return tmp_path


def test_a_plugin_of_every_kind_is_used_by_name_in_a_command_and_in_python(folder):
    assert dispatch(["train", *FLAGS, *QUICK, "--run-dir", "command"]) == 0
    options = {"iterations": 3, "batch_size": 8, "threads": 1, "report": False, "curves": False, "strict": True}
    run = convolve.train(
        "tiny-rows",
        "tiny-net",
        loss="tiny-loss",
        metrics=["tiny-metric"],
        optimizer="tiny-optimizer",
        augment="tiny-augmentation",
        lr_schedule="tiny-schedule",
        callbacks=["tiny-callback"],
        run_dir="python",
        **options,
    )
    assert weights_hash(folder / "command") == weights_hash(folder / "python")
    for found in (run, convolve.open("command")):
        assert list(found.metrics["metrics"]) == ["sure"] and (found.path / "callback.txt").read_text() == "called"
    again = ["--loss", "tiny-loss", "--metrics", "tiny-metric"]
    assert dispatch(["restore", "command", "--iterations", "4", *again]) == 0, "installed code is trusted"
    assert convolve.open("command").load().classes == ("top", "bottom")


def test_names_of_installed_packages_are_listed(folder):
    assert "tiny-net" in [info.name for info in convolve.models.list("tiny*")]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling builds the package of this test")
    return install(tmp_path_factory.mktemp("other"), "other_plugins", "import no_such_module\n")


@pytest.mark.parametrize(("flag", "name"), [*zip(FLAGS[::2], NAMES, strict=True)])
def test_a_package_that_cannot_be_imported_is_one_clear_line(flag, name, other, tmp_path, monkeypatch):
    forget(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(other)
    with pytest.raises(convolve.ConfigError, match=f"{name}: cannot import other_plugins:.*fix or uninstall") as caught:
        dispatch(["train", flag, name, *QUICK, *([] if flag == "--dataset" else ["--dataset", "digits"])])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("flag", "name"), [*zip(FLAGS[::2], NAMES, strict=True)])
def test_a_name_of_two_packages_is_one_clear_line(flag, name, other, folder, monkeypatch):
    monkeypatch.syspath_prepend(other)
    with pytest.raises(convolve.ConfigError, match=f"{name}: offered more than once .*tiny.plugins|by 2 packages"):
        dispatch(["train", flag, name, *QUICK, *([] if flag == "--dataset" else ["--dataset", "digits"])])
