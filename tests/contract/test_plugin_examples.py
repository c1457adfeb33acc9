"""The plugins in examples/ are short, and each runs."""

import runpy

import pytest

import convolve
from convolve.cli.main import dispatch
from documents import ROOT

FOLDER = ROOT / "examples" / "plugins"
QUICK = ["--iterations", "3", "--batch-size", "8", "--no-report", "--no-curves"]


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
    ("name", "printed"),
    [("loss", "runs/"), ("metric", "runs/"), ("callback", "epoch 1: accuracy"), ("module", "torch.nn")],
)
def test_the_program_runs(name, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert printed in capsys.readouterr().out
