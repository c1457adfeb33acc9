"""`sweep`: combinations side by side, successive halving, several processes, interruptions."""

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import convolve
from convolve.api.sweep import pauses
from convolve.cli.main import dispatch
from convolve.config import ModelConfig
from convolve.interpreter import module_command
from convolve.models import registry

QUICK = {
    "optimizer": "adam",
    "threads": 1,
    "epochs": 1,
    "validation_frequency": 0.25,
    "batch_size": 64,
    "curves": False,
    "report": False,
}
RATES = [1e-6, 3e-3, 1e-3, 1e-5]
WORDS = ["--dataset", "digits", "--model", "lenet5", "--grid", "learning-rate=1e-6,3e-3,1e-3,1e-5", "--halving", "2"]
WORDS += ["--optimizer", "adam", "--threads", "1", "--epochs", "1", "--validation-frequency", "0.25"]
WORDS += ["--batch-size", "64", "--no-curves", "--no-report"]


def ranking(folder):
    return json.loads((Path(folder) / "sweep.json").read_text())["ranking"]


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    """A sweep by successive halving that nothing interrupted."""
    folder = tmp_path_factory.mktemp("halved") / "sweep"
    return convolve.sweep({"learning_rate": RATES}, "digits", "lenet5", halving=2, run_dir=folder, **QUICK)


def test_successive_halving_trains_the_best_combinations_longest(halved):
    assert halved.epochs == (1.0, 0.5, 0.25, 0.25)
    assert halved.options[0]["learning_rate"] >= 1e-3 and halved.accuracies[2] >= halved.accuracies[3]
    assert halved.best.finished and not halved.runs[1].finished
    assert halved.accuracies[0] == max(record.accuracy for record in halved.best.validations)
    assert [row["accuracy"] for row in ranking(halved.folder)] == list(halved.accuracies)
    assert "learning_rate" in halved.plot()._repr_html_() and "0.25" in halved._repr_html_()


def test_a_run_that_was_paused_has_the_bits_of_one_that_was_not(halved, tmp_path):
    whole = convolve.train("digits", "lenet5", run_dir=tmp_path / "run", **halved.options[0], **QUICK)
    files = [run.checkpoints[-1].path / "model.safetensors" for run in (whole, halved.best)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_killed_sweep_continues_with_the_same_ranking(halved, tmp_path, capsys):
    """The process is killed as soon as the second combination has a complete checkpoint."""
    words = [*WORDS, "--run-dir", str(tmp_path / "sweep"), "--resume"]
    started = subprocess.Popen(module_command("convolve", "sweep", *words), stdout=subprocess.PIPE, text=True)
    for line in started.stdout:
        if line.startswith("1 of 4"):
            os.kill(started.pid, signal.SIGKILL)
    started.stdout.close()
    assert started.wait() == -signal.SIGKILL and "ranking" not in json.loads(
        (tmp_path / "sweep" / "sweep.json").read_text()
    )
    assert dispatch(["sweep", *words, "--json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "1 of 4" not in printed[1] and "2 of 4" in printed[1]
    rows = [
        {**row, "options": {"learning_rate": float(row["options"]["learning_rate"])}}
        for row in ranking(tmp_path / "sweep")
    ]
    assert [(row["options"], row["accuracy"], row["epochs"]) for row in rows] == [
        (row["options"], row["accuracy"], row["epochs"]) for row in ranking(halved.folder)
    ]
    with pytest.raises(convolve.ConfigError, match="its sweep has other options; use those, or another folder"):
        dispatch(["sweep", *words, "--weight-decay", "0.1"])


def test_several_processes_give_the_result_of_one(tmp_path):
    given = {**QUICK, "epochs": 0.25}
    rates = {"learning_rate": [1e-6, 3e-3]}
    results = [
        convolve.sweep(rates, "digits", "lenet5", jobs=jobs, run_dir=tmp_path / str(jobs), **given) for jobs in (1, 2)
    ]
    assert results[0].options == results[1].options and results[0].accuracies == results[1].accuracies
    weights = [
        (run.checkpoints[-1].path / "model.safetensors").read_bytes() for result in results for run in result.runs
    ]
    assert weights[:2] == weights[2:]


def test_a_combination_that_diverges_is_last_and_does_not_end_the_sweep(tmp_path, capsys):
    given = {**QUICK, "epochs": 0.25, "optimizer": "sgd", "progress": True}
    result = convolve.sweep({"learning_rate": [1e15, 1e-3]}, "digits", "lenet5", run_dir=tmp_path / "sweep", **given)
    assert [options["learning_rate"] for options in result.options] == [1e-3, 1e15]
    assert result.accuracies[1] is None and "training has diverged" in capsys.readouterr().out


def test_the_command_tries_three_learning_rates_on_photos_and_ranks_by_training(tmp_path, capsys, monkeypatch):
    """The classifier on frozen features is the best checkpoint of each run, so the validations after it decide."""
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for number in range(42):
        folder = tmp_path / "photos" / ("val" if number < 12 else "train") / f"class {number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 120, (40, 40, 3), np.uint8)
        pixels[..., number % 3] += 100
        Image.fromarray(pixels).save(folder / f"{number}.png")
    model = registry.build(
        "resnet8-cifar", classes=7, input_shape=(3, 32, 32), seed=5, options=ModelConfig(model="resnet8-cifar")
    )
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "w.safetensors")
    words = ["photos", "--model", "resnet8-cifar", "--weights", "w.safetensors", "--image-size", "32"]
    words += ["--learning-rate", "0.01", "--clip-norm", "none", "--warmup-epochs", "0", "--epochs", "1"]
    words += ["--batch-size", "8", "--threads", "1", "--no-curves", "--no-report", "--normalization", "symmetric"]
    with pytest.raises(convolve.ConfigError, match="a plot is saved as .svg or .html"):
        dispatch(["sweep", *words, "--plot", "sweep.png"])
    assert dispatch(["sweep", *words, "--metrics", "top5_accuracy", "--plot", "sweep.svg"]) == 0
    printed = capsys.readouterr().out
    assert "photos: 30 photos of 3 classes to train, 12 to validate" in printed
    folder = tmp_path / "runs" / "photos-sweep-1"
    rows = ranking(folder)
    assert {row["options"]["learning_rate"] for row in rows} == {0.003, 0.01, 0.03}
    assert [row["accuracy"] for row in rows] == [1.0, 1.0, 1.0]
    assert all("top5_accuracy" in convolve.open(folder / row["run"]).validations[-1].metrics for row in rows)
    trained = [min(one.loss for one in convolve.open(folder / row["run"]).validations if one.step) for row in rows]
    assert trained == sorted(trained)
    assert printed.splitlines()[-1] == f"best run runs/photos-sweep-1/{rows[0]['run']}"
    drawn = (tmp_path / "sweep.svg").read_text()
    assert all(text in drawn for text in ("validation accuracy", "training loss", "learning_rate=0.03"))


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        ({"learning_rate": [1, 2]}, {"jobs": 0}, "jobs=0: must be at least 1"),
        ({"learning_rate": [1, 2]}, {"halving": 1}, "halving=1: must be at least 2"),
        (
            {"learning_rate": [1, 2]},
            {"halving": 2, "iterations": 9},
            "halving=2: needs runs of the same number of epochs",
        ),
        ({"epochs": [1, 2]}, {"halving": 2}, "halving=2: needs runs of the same number of epochs"),
        (
            {"learning_rate": [1, 2]},
            {"halving": 2, "epochs": 1},
            "halving=2: runs of 1 epochs, validated every 1, are too",
        ),
        (
            {"learning_rate": [1, 2]},
            {"halving": 2, "checkpoints": False},
            "needs validation during training and checkpoi",
        ),
        ({"learning_rate": [1, 2]}, {"minutes": 1}, "minutes=1: a sweep compares equal lengths"),
        ({"learning_rate": [1, 2]}, {"logs": False}, "no_logs: a sweep compares the validations in the logs"),
        ({"run_dir": ["a", "b"]}, {}, "run_dir: is that of the whole sweep"),
        ({"learning_rate": [1, -2]}, {}, "learning_rate=-2: must be greater than"),
    ],
)
def test_what_a_sweep_cannot_do_is_rejected_before_it_starts(tmp_path, monkeypatch, grid, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(convolve.ConfigError, match=message):
        convolve.sweep(grid, "digits", "lenet5", **options)
    assert list(tmp_path.iterdir()) == []


def test_functions_of_the_main_program_cannot_run_in_several_processes(tmp_path):
    def build():
        raise AssertionError("never called")

    build.__module__ = "__main__"
    with pytest.raises(
        convolve.ConfigError,
        match="jobs: .* is defined in (the main program|a notebook), which other processes cannot import",
    ):
        convolve.sweep({"seed": [0, 1]}, "digits", build, jobs=2, run_dir=tmp_path / "sweep", **QUICK)


@pytest.mark.parametrize(
    ("combinations", "epochs", "factor", "expected"),
    [(9, 9, 3, [1, 3]), (27, 9, 3, [1, 3]), (8, 16, 2, [2, 4, 8]), (1, 5, 3, []), (4, 10, 3, [3])],
)
def test_pauses_are_multiples_of_the_validation_interval(combinations, epochs, factor, expected):
    assert pauses(combinations, convolve.Config.read("lenet-digits", epochs=epochs), factor) == expected
