"""Which split selects, which is read once at the end, and what the output calls them."""

import json

import pytest

import convolve
from convolve.cli import train, validate
from convolve.config.loading import resolve
from convolve.data.build import DataModule
from convolve.errors import ConfigError
from convolve.loggers.base import SilentConsole
from convolve.loggers.files import read_validations
from convolve.runs import session
from drawn_photos import write_photos


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))


def config_of(data, folder, **given):
    options = {"model": "lenet5", "data_dir": data, "image_size": 32, "batch_size": 8, "epochs": 2, "threads": 1}
    quiet = {"curves": False, "report": False, "learning_rate": 0.02, "augment": "none", "run_dir": folder}
    return resolve(None, None, {**options, **quiet, **given}).config


@pytest.fixture
def photos(tmp_path):
    for split, first in (("train", 0), ("val", 100), ("test", 200)):
        write_photos(tmp_path / "photos" / split, {"a": 9 if split == "train" else 3, "b": 4}, first=first)
    return tmp_path / "photos"


def test_validation_selects_and_test_is_read_once_at_the_end(photos, tmp_path, monkeypatch):
    opened = []
    for name in ("validation_loader", "test_loader"):
        real = getattr(DataModule, name)
        monkeypatch.setattr(DataModule, name, lambda self, name=name, real=real: opened.append(name) or real(self))
    report = session.train(config_of(photos, tmp_path / "run"), SilentConsole())
    assert opened == ["validation_loader", "test_loader"]
    assert report.split == "test" and report.test_samples == 7
    assert [record.samples for record in read_validations(tmp_path / "run")] == [7, 7]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    scored = [event for event in events if event["kind"] == "test"]
    assert len(scored) == 1 and scored[0]["accuracy"] == report.test_accuracy


@pytest.mark.parametrize("mode", ["during", "after"])
def test_the_best_checkpoint_is_the_one_that_is_tested(photos, tmp_path, mode):
    config = config_of(photos, tmp_path / "run", epochs=3, validation_mode=mode)
    report = session.train(config, SilentConsole())
    assert validate.run([str(tmp_path / "run")]) == 0
    records = read_validations(tmp_path / "run")
    assert len(records) == 3 and report.test_accuracy is not None


def test_a_run_on_train_and_val_reports_a_validation_accuracy(photos, tmp_path, capsys):
    (photos / "test").rename(tmp_path / "elsewhere")
    argv = ["--model", "lenet5", "--data-dir", str(photos), "--image-size", "32", "--epochs", "1"]
    assert train.run([*argv, "--run-dir", str(tmp_path / "run"), "--no-report", "--no-curves", "--threads", "1"]) == 0
    assert "validation accuracy" in capsys.readouterr().out.splitlines()[-1]


def test_cross_validation_trains_once_for_each_fold(tmp_path, capsys):
    write_photos(tmp_path / "photos", {"a": 8, "b": 8})
    argv = ["--model", "lenet5", "--data-dir", str(tmp_path / "photos"), "--image-size", "32", "--epochs", "1"]
    quiet = ["--no-report", "--no-curves", "--threads", "1", "--batch-size", "4", "--json"]
    assert train.run([*argv, *quiet, "--folds", "2", "--run-dir", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    accuracies = [run["test_accuracy"] for run in report["runs"]]
    assert report["mean"] == pytest.approx(sum(accuracies) / 2) and lines[-2].endswith("over 2 folds")
    assert all((tmp_path / "run" / f"fold-{fold}" / "summary.json").is_file() for fold in range(2))
    assert sum(run["test_samples"] for run in report["runs"]) == 16


def test_several_folds_are_no_single_run(tmp_path):
    write_photos(tmp_path / "photos", {"a": 8, "b": 8})
    for model in ("lenet5", None):
        with pytest.raises(ConfigError, match="folds=2: is several runs; use cross_validate"):
            convolve.train(tmp_path / "photos", model, folds=2, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="cross_validate: give folds=5"):
        convolve.cross_validate(tmp_path / "photos", "lenet5", folds=2, fold=1)
    assert not (tmp_path / "run").exists()


def test_photos_without_a_model_are_cross_validated(tmp_path, capsys):
    write_photos(tmp_path / "photos", {"a": 8, "b": 8})
    argv = [str(tmp_path / "photos"), "--weights", "none", "--image-size", "32", "--epochs", "1", "--folds", "2"]
    quiet = ["--no-report", "--no-curves", "--no-check-data", "--threads", "1", "--json"]
    assert train.run([*argv, *quiet, "--run-dir", str(tmp_path / "run")]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [run["test_samples"] for run in report["runs"]] == [8, 8]


def test_one_fold_trains_alone(tmp_path):
    write_photos(tmp_path / "photos", {"a": 8, "b": 8})
    config = config_of(tmp_path / "photos", tmp_path / "run", folds=4, fold=3, epochs=1)
    assert not config.is_cross_validation
    assert session.train(config, SilentConsole()).test_samples == 4


def test_folds_with_several_processes_are_an_error(tmp_path):
    with pytest.raises(ConfigError, match="--folds 2 with several processes: train one fold at a time"):
        config_of(tmp_path, tmp_path / "run", folds=2, replicas=2)
