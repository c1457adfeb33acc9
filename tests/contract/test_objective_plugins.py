"""Losses and metrics by name on the command line: same bits as objects, and nothing that files name is imported."""

import json
import sys

import pytest
import torch

import convolve
from convolve import plugins
from convolve.cli.main import dispatch
from digit_runs import weights_hash
from user_plugins import forget

QUICK = {"iterations": 4, "batch_size": 16, "threads": 1, "curves": False, "report": False}
FLAGS = ["--dataset=digits", "--model=lenet5", "--batch-size", "16", "--threads", "1", "--no-report", "--no-curves"]
CODE = """
from torch import nn


def focal(outputs, targets):
    loss = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (1 - (-loss).exp()) ** 2 * loss


def certain(outputs, targets):
    return outputs.softmax(1).gather(1, targets[:, None])[:, 0] > 0.2


class Correct:
    name = "correct"
    higher_is_better = True

    def update(self, outputs, targets):
        return (outputs.argmax(1) == targets).sum()[None]

    def compute(self, sums):
        return float(sums[0])


class NeedsName(Correct):
    def __init__(self, name):
        self.name = name


def one_argument(outputs):
    return outputs


def wide(outputs, targets):
    return outputs


WORD = "text"
"""
REGISTER = """
import convolve
convolve.losses.register("focal")(focal)
convolve.metrics.register("certain")(certain)
convolve.metrics.register("correct")(Correct)
"""
TYPED = ["--loss", "own_objective:focal", "--metrics", "own_objective:certain", "--metrics", "own_objective:Correct"]
NAMED = ["--plugin", "objective.py", "--loss", "focal", "--metrics", "certain", "--metrics", "correct"]


def forget_all(monkeypatch):
    sys.modules.pop("own_objective", None)
    forget(monkeypatch)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a package `own_objective` and a plugin file `objective.py`."""
    (tmp_path / "own_objective.py").write_text(CODE)
    (tmp_path / "objective.py").write_text(CODE + REGISTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    forget_all(monkeypatch)
    yield tmp_path
    sys.modules.pop("own_objective", None)


def test_a_loss_and_metrics_are_objects_names_or_typed_code_with_the_same_bits(folder):
    from own_objective import Correct, certain, focal

    run = convolve.train("digits", "lenet5", loss=focal, metrics=[certain, Correct], run_dir="object", **QUICK)
    for name, words in (("typed", TYPED), ("named", NAMED)):
        assert dispatch(["train", *FLAGS, "--iterations", "4", *words, "--run-dir", name]) == 0
        assert weights_hash(folder / name) == weights_hash(folder / "object")
        assert convolve.open(name).metrics["metrics"] == run.metrics["metrics"]
    assert list(run.metrics["metrics"]) == ["certain", "correct"]


def test_a_run_with_a_loss_resumes_with_its_code_only_and_nothing_is_imported_before(folder, monkeypatch):
    for name, steps in (("whole", "4"), ("run", "2")):
        assert dispatch(["train", *FLAGS, "--iterations", steps, *TYPED, "--run-dir", name]) == 0
    forget_all(monkeypatch)
    with pytest.raises(convolve.ConfigError, match="loss focal: the run was trained with your loss; give .* --loss"):
        dispatch(["restore", "run", "--iterations", "4"])
    assert "own_objective" not in sys.modules
    assert dispatch(["restore", "run", "--iterations", "4", *TYPED]) == 0
    assert weights_hash(folder / "run") == weights_hash(folder / "whole")


def test_a_validation_uses_the_loss_and_metrics_that_are_typed(folder, capsys):
    assert dispatch(["train", *FLAGS, "--iterations", "2", *TYPED, "--run-dir", "run"]) == 0
    stored = convolve.open("run").validations[-1]
    capsys.readouterr()
    assert dispatch(["validate", "run", "--json", *TYPED]) == 0
    [found] = json.loads(capsys.readouterr().out.splitlines()[-1])["validations"]
    assert (found["loss"], found["metrics"]) == (stored.loss, stored.metrics)
    assert dispatch(["validate", "run", "--metrics", "top5_accuracy", "--json"]) == 0
    output = capsys.readouterr()
    assert "loss focal: not given, so cross-entropy is shown; add --loss" in output.out + output.err
    [found] = json.loads(output.out.splitlines()[-1])["validations"]
    outputs = convolve.open("run").validate(outputs=True).outputs
    best = torch.from_numpy(outputs.logits).topk(5).indices == torch.from_numpy(outputs.targets)[:, None]
    assert found["metrics"] == {"top5_accuracy": pytest.approx(float(best.any(1).float().mean()))}


def test_the_switch_of_metrics_remains(folder):
    assert dispatch(["train", *FLAGS, "--iterations", "1", "--no-metrics", "--run-dir", "off"]) == 0
    assert dispatch(["train", "--metrics", *FLAGS, "--iterations", "1", "--run-dir", "on"]) == 0
    assert [convolve.open(name).config.log.metrics for name in ("off", "on")] == [False, True]


def test_find_lr_accepts_a_loss(folder, capsys):
    words = ["--loss", "own_objective:focal", "--steps", "10", "--threads", "1", "--json"]
    assert dispatch(["find-lr", *FLAGS[:4], *words]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["suggestion"] > 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--loss focul --plugin objective.py", "loss focul: unknown name; did you mean focal"),
        ("--loss focul", "loss focul: unknown name; register it with @convolve.losses.register in a file of --plugin"),
        ("--loss own_objective:focul", "--loss own_objective:focul: own_objective has no attribute 'focul'; did you"),
        ("--loss no_such_package:focal", "--loss no_such_package:focal: cannot import no_such_package .ModuleNotF"),
        ("--loss own_objective:WORD", "loss 'own_objective:WORD': not callable; pass a function of outputs"),
        ("--loss own_objective:one_argument", r"loss one_argument: failed for outputs \[2, 10\] and labels \[2\]"),
        ("--loss own_objective:wide", r"loss wide: returned shape \(2, 10\) for 2 samples; return one value per"),
        ("--loss cross-entropy", "--loss cross-entropy: is the default; omit it"),
        ("--loss own_objective:focal --label-smoothing 0.1", "--label-smoothing 0.1: applies to the built-in cross-"),
        ("--metrics top5_acuracy", "metric top5_acuracy: unknown name; did you mean top5_accuracy"),
        ("--metrics own_objective:sertain", "--metrics own_objective:sertain: own_objective has no attribute"),
        ("--metrics no_such_package:certain", "--metrics no_such_package:certain: cannot import no_such_package"),
        ("--metrics own_objective:WORD", "metric 'text': not a metric; pass a function or an object with update"),
        ("--metrics own_objective:one_argument", r"metric one_argument: failed for outputs \[2, 10\] and labels"),
        ("--metrics own_objective:wide", r"metric wide: returned shape \(2, 10\) for 2 samples; return one value"),
        ("--metrics own_objective:NeedsName", "metric NeedsName: cannot be made .TypeError.*give a class without"),
        ("--metrics own_objective:certain --metrics own_objective:certain", "metric certain: the name is taken"),
        ("--plugin missing.py --loss focal", "--plugin missing.py: no such file; give a Python file"),
    ],
)
def test_a_wrong_loss_or_metric_on_the_command_line_is_one_clear_line(folder, flags, problem):
    with pytest.raises(convolve.ConfigError, match=problem) as caught:
        dispatch(["train", *FLAGS, "--iterations", "1", *flags.split(), "--run-dir", "run"])
    assert "\n" not in str(caught.value) and not (folder / "run").exists()


@pytest.mark.parametrize(
    ("registry", "name", "owners"),
    [
        (plugins.LOSSES, "focal", "one.focal, objective.focal"),
        (plugins.METRICS, "certain", "one.focal, objective.certain"),
    ],
)
def test_a_name_of_a_loss_or_metric_is_offered_once(folder, registry, name, owners):
    registry.register(name, print, "one.focal")
    with pytest.raises(convolve.ConfigError, match=f"{registry.kind} {name}: offered more than once .{owners}"):
        dispatch(["train", *FLAGS, "--iterations", "1", *NAMED])


def test_a_name_of_convolve_is_not_offered_again(folder):
    convolve.metrics.register("top5_accuracy")(print)
    with pytest.raises(convolve.ConfigError, match="metric top5_accuracy: offered more than once .convolve, builtins"):
        dispatch(["train", *FLAGS, "--iterations", "1", "--metrics", "top5_accuracy"])


def test_a_sweep_trains_with_the_named_loss_and_metrics(folder, capsys):
    words = ["--grid", "seed=0", "--iterations", "2", "--run-dir", "sweep", "--json"]
    assert dispatch(["sweep", *FLAGS, *TYPED, *words]) == 0
    [swept] = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert dispatch(["train", *FLAGS, *TYPED, "--iterations", "2", "--run-dir", "run"]) == 0
    run, alone = convolve.open(swept["run"]), convolve.open("run")
    assert weights_hash(run.path) == weights_hash(alone.path)
    assert {"certain", "correct"} <= set(run.metrics["metrics"])


def test_a_cross_validation_rejects_what_belongs_to_one_run(folder):
    with pytest.raises(convolve.ConfigError, match="--loss own_objective:focal: is for one run; add --fold N"):
        dispatch(["train", *FLAGS, "--iterations", "1", "--folds", "3", "--loss", "own_objective:focal"])
