"""The plugins in examples/ are short, and each runs."""

import json
import runpy

import pytest

import convolve
from convolve.cli.main import dispatch
from documents import ROOT
from user_plugins import forget

FOLDER = ROOT / "examples" / "plugins"
QUICK = ["--iterations", "3", "--batch-size", "8", "--no-report", "--no-curves"]


@pytest.fixture(autouse=True)
def _forget_names(monkeypatch):
    """Leave no registered names and loaded files to other tests."""
    forget(monkeypatch)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_a_plugin_has_at_most_20_lines_of_code(path):
    body = path.read_text().split('"""', 2)[2]
    assert sum(bool(line.strip()) for line in body.splitlines()) <= 20


def test_the_model_and_the_data_set_are_used_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, data = (str(FOLDER / name) for name in ("model.py", "dataset.py"))
    named = ["--model", "two-layers", "--dataset", "stripes", "--run-dir", "run"]
    assert dispatch(["train", "--plugin", model, "--plugin", data, *named, *QUICK]) == 0
    assert dispatch(["restore", "run", "--iterations", "4", "--plugin", model, "--plugin", data]) == 0
    assert convolve.open("run").metrics["dataset"] == "stripes"


@pytest.mark.parametrize(
    ("file", "kind", "name"), [("optimizer", "optimizer", "lion"), ("augmentation", "augment", "roll")]
)
def test_a_part_is_used_by_its_name(file, kind, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plugin = ["--plugin", str(FOLDER / f"{file}.py")]
    words = [f"--{kind}", name, "--dataset", "digits", "--run-dir", "run", "--strict"]
    assert dispatch(["train", *plugin, *words, *QUICK]) == 0
    assert dispatch(["restore", "run", "--iterations", "4", *plugin]) == 0
    assert convolve.open("run").config.values()[kind] == name and convolve.open("run").lost_guarantees == []


def test_the_loss_and_the_metric_are_used_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plugins = [word for name in ("loss", "metric") for word in ("--plugin", str(FOLDER / f"{name}.py"))]
    named = ["--loss", "focal", "--metrics", "certain"]
    words = [*plugins, *named, "--dataset", "digits", "--run-dir", "run", "--strict"]
    assert dispatch(["train", *words, *QUICK]) == 0
    assert dispatch(["restore", "run", "--iterations", "4", *plugins, *named]) == 0
    assert list(convolve.open("run").metrics["metrics"]) == ["certain"]


def test_the_logger_is_used_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--callbacks", "accuracy-log", "--dataset", "digits", "--run-dir", "run"]
    assert dispatch(["train", "--plugin", str(FOLDER / "logger.py"), *words, *QUICK]) == 0
    [line] = (tmp_path / "run.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 3, "accuracy": convolve.open("run").metrics["test_accuracy"]}


@pytest.mark.parametrize(
    ("name", "printed"),
    [("loss", "runs/"), ("metric", "runs/"), ("callback", "epoch 1: accuracy"), ("module", "torch.nn")],
)
def test_the_program_runs(name, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert printed in capsys.readouterr().out
