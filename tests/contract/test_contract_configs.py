"""Every shipped config loads, builds and trains a few steps."""

import math

import pytest

from convolve.app import train
from convolve.app.console import SilentConsole
from convolve.config.loading import resolve, shipped


@pytest.mark.parametrize("name", list(shipped()))
def test_a_shipped_config_trains(name, tmp_path):
    small = {"dataset": "digits", "hold_out": 0, "iterations": 3, "warmup_epochs": 0, "curves": False, "batch_size": 32}
    report = train.run(resolve(name, None, {**small, "run_dir": tmp_path / "run"}).config, SilentConsole())
    assert report.steps == 3
    assert report.final_loss is not None and math.isfinite(report.final_loss)


@pytest.mark.parametrize("kind", ["generated_data", "synthetic_data"])
def test_made_up_data_train(kind, tmp_path):
    given = {kind: True, "iterations": 2, "validation_mode": "none", "run_dir": tmp_path / "run", "warmup_epochs": 0}
    report = train.run(resolve("lenet-mnist", None, given).config, SilentConsole())
    assert (report.steps, report.test_accuracy) == (2, None)


@pytest.mark.parametrize("mode", ["after", "during", "none"])
def test_validation_modes(mode, tmp_path):
    given = {"epochs": 2, "validation_mode": mode, "run_dir": tmp_path / "run", "warmup_epochs": 0, "threads": 1}
    report = train.run(resolve("lenet-digits", None, given).config, SilentConsole())
    rows = (report.run_dir / "validation.csv").read_text().splitlines()[1:]
    assert len(rows) == {"after": 2, "during": 2, "none": 0}[mode]
    assert (report.test_accuracy is None) == (mode == "none")


def test_without_logs_and_checkpoints_little_is_written(tmp_path):
    given = {"epochs": 1, "logs": False, "checkpoints": False, "metrics": False, "run_dir": tmp_path / "run"}
    train.run(resolve("lenet-digits", None, {**given, "warmup_epochs": 0}).config, SilentConsole())
    assert {path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")} == {"config.yml"}
