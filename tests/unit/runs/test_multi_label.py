"""Runs on images with several labels or soft ones: from a table, from arrays, and everything that reads the run."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import convolve
from convolve.errors import CheckpointError, ConfigError, DataError
from convolve.inference.metadata import ModelMetadata
from convolve.runs.folds import summarize_folds
from convolve.runs.results import TrainReport
from digit_runs import weights_hash
from labeled_shapes import COLORS, make_arrays, write_folder

SETTINGS = {"epochs": 3, "batch_size": 8, "optimizer": "adam", "learning_rate": 0.003, "seed": 1, "threads": 1}
SETTINGS |= {"curves": False, "normalization": "standard"}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "shapes", 150)


@pytest.fixture(scope="module")
def run(shapes, tmp_path_factory):
    return convolve.train(shapes, "cnn-wide", run_dir=tmp_path_factory.mktemp("runs") / "shapes", **SETTINGS)


def state_of(checkpoint):
    return json.loads((checkpoint.path / "state.json").read_text())


def test_a_run_learns_the_labels(run):
    figures = run.metrics
    assert figures["metrics"]["mean_average_precision"] > 0.9
    assert [label["label"] for label in figures["labels"]] == list(COLORS)
    assert all(
        0 <= label[key] <= 1 for label in figures["labels"] for key in ("precision", "recall", "f1", "threshold")
    )
    assert all(record.metrics["mean_average_precision"] > 0 for record in run.validations)
    assert not run.training[0].metrics


def test_the_checkpoint_with_the_highest_mean_average_precision_is_the_best(run):
    scores = {record.checkpoint: record.metrics["mean_average_precision"] for record in run.validations}
    best = next(checkpoint for checkpoint in run.checkpoints if checkpoint.best)
    assert scores[best.name] == max(scores.values())
    assert best.metrics["mean_average_precision"] == scores[best.name]


def test_thresholds_are_those_of_the_validation_split(run):
    for checkpoint in run.checkpoints:
        state = state_of(checkpoint)
        assert state["task"] == "multi-label"
        assert len(state["thresholds"]) == 3 and all(0 < value < 1 for value in state["thresholds"])
    loaded = convolve.load(run)
    best = next(checkpoint for checkpoint in run.checkpoints if checkpoint.best)
    assert list(loaded.thresholds) == state_of(best)["thresholds"]
    assert [label["threshold"] for label in run.metrics["labels"]] == state_of(best)["thresholds"]


def test_validation_prints_the_scores_of_each_label(run, quick_command):
    done = quick_command("validate", run.path)
    assert "mean_average_precision" in done.stdout
    assert re.search(r"label +images +average precision +threshold +precision +recall +F1", done.stdout)
    for name in COLORS:
        assert re.search(rf"{name} +\d+ +[\d.]+% +0\.\d+", done.stdout)
    record = run.validate(progress=False)
    assert [score.label for score in record.labels] == list(COLORS)


def test_predictions_are_the_labels_above_their_thresholds(run, shapes, quick_command):
    files = sorted((shapes / "images").glob("00*.png"))
    model = run.load()
    for prediction in model.predict_many(files):
        limits = dict(zip(model.classes, model.thresholds, strict=True))
        assert prediction.labels == tuple(name for name, value in prediction.top if value >= limits[name])
        assert prediction.label == prediction.top[0][0]
    done = quick_command("predict", run.path, *files, "--engine", "torch", "--csv")
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if "," in line and not line.startswith("eng")))
    found = {row["file"]: row["labels"] for row in rows}
    assert found == {str(file): ";".join(model.predict(file).labels) for file in files}
    assert rows[0]["label_1"] in COLORS and 0 <= float(rows[0]["probability_1"]) <= 1


def test_probabilities_are_sigmoids(run, shapes):
    model = run.load()
    pixels = np.stack([make_arrays(4)[0][row] for row in range(4)])
    with torch.inference_mode():
        inputs = model._metadata.transform(torch.from_numpy(pixels))
        expected = model.module(inputs).sigmoid().numpy()
    assert np.allclose(model.probabilities(pixels), expected, atol=1e-6)


def test_the_report_shows_the_labels(run):
    page = (run.path / "report.html").read_text()
    assert "mean average precision</p>" in page and "<h3>Labels</h3>" in page and "Mean average precision" in page
    assert "Confusion" not in page and "Calibration" not in page
    again = convolve.report(run, run, output=run.path / "both.html")
    assert "mean average precision" in again.path.read_text()
    assert again.runs[0].mean_average_precision == pytest.approx(run.metrics["metrics"]["mean_average_precision"])


def test_abstaining_is_rejected(run, shapes, quick_command):
    done = quick_command("predict", run.path, shapes / "images" / "000.png", "--abstain", "0.9")
    assert done.returncode == 2
    assert "--abstain 0.9: a model of several labels predicts none if it is unsure" in done.stderr


def test_an_exported_file_predicts_the_same_labels(run, shapes, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
    exported = convolve.load(run.export(output=tmp_path / "shapes.onnx").path)
    model = run.load()
    assert exported.thresholds == model.thresholds
    files = sorted((shapes / "images").glob("01*.png"))
    pairs = zip(exported.predict_many(files), model.predict_many(files), strict=True)
    assert all(one.labels == other.labels for one, other in pairs)
    with pytest.raises(CheckpointError, match="cannot read its metadata"):
        ModelMetadata.from_json(model._metadata.to_json().replace('"thresholds": [', '"thresholds": [7, '), "file")


def test_int8_measures_whole_images(run, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
    report = run.export(output=tmp_path / "int8.onnx", int8=True, max_accuracy_loss=1.0)
    assert report.accuracy == pytest.approx(run.metrics["test_accuracy"], abs=0.2)
    assert report.test_samples == 25 and 0 <= report.int8_accuracy <= 1


def test_a_sweep_and_folds_compare_mean_average_precision(shapes, tmp_path):
    options = {**SETTINGS, "epochs": 1, "report": False, "log_dir": tmp_path, "select_by": "accuracy"}
    del options["learning_rate"]
    found = convolve.sweep({"learning_rate": [1e-6, 0.003]}, shapes, "cnn-wide", **options)
    scores = [max(record.mean_average_precision for record in one.validations) for one in found.runs]
    assert list(found.accuracies) == scores == sorted(scores, reverse=True)
    reports = [
        TrainReport(tmp_path, 0.1, 8, 0, 0, 0, 1, None, "", metrics={"mean_average_precision": x}) for x in (0.4, 0.6)
    ]
    assert summarize_folds(2, reports).mean == pytest.approx(0.5)


@pytest.mark.parametrize("labels", ["several", "one"])
def test_a_classifier_is_fitted_on_features(labels, tmp_path):
    root = write_folder(tmp_path / "shapes", 60)
    if labels == "one":
        rows = [line.split(",") for line in (root / "labels.csv").read_text().splitlines()]
        kept = [f"{row[0]},{'red' if number % 5 else 'blue'},{row[-1]}\n" for number, row in enumerate(rows)]
        (root / "labels.csv").write_text("".join(kept))
    options = {**SETTINGS, "epochs": 0, "fit_head": True, "report": False}

    def fit(name, **given):
        run = convolve.train(root, "resnet20-cifar", run_dir=tmp_path / name, **options, **given)
        return run, load_file(run.checkpoints[-1].path / "model.safetensors")

    run, plain = fit("plain")
    if labels == "several":
        assert run.metrics["metrics"]["mean_average_precision"] > 0.5
        assert len(state_of(run.checkpoints[-1])["thresholds"]) == 3
        return
    _, weighted = fit("weighted", class_weights="auto")
    changed = [name for name in plain if not torch.equal(plain[name], weighted[name])]
    assert changed and all(name.startswith("fc") or "classifier" in name for name in changed)


class StopAt(convolve.Callback):
    def __init__(self, step):
        self.step = step

    def on_start(self, run):
        self.run = run

    def on_log(self, record):
        if record.step >= self.step:
            self.run.stop("enough")


@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_a_stopped_run_resumes_to_the_same_bits(shapes, tmp_path, mixup):
    options = {**SETTINGS, "epochs": 2, "mixup_alpha": mixup, "report": False, "patience": 5, "ema_decay": 0.9}
    whole = convolve.train(shapes, "cnn-wide", run_dir=tmp_path / "whole", **options)
    halted = tmp_path / "stopped"
    stopped = convolve.train(shapes, "cnn-wide", run_dir=halted, logs_per_epoch=6, callbacks=[StopAt(15)], **options)
    assert not stopped.finished
    resumed = stopped.resume()
    assert weights_hash(resumed.path) == weights_hash(whole.path)
    states = [state_of(one.checkpoints[-1]) for one in (whole, resumed)]
    assert states[0]["thresholds"] == states[1]["thresholds"]
    assert states[0]["best_validation"] == states[1]["best_validation"]
    assert whole.metrics["labels"] == resumed.metrics["labels"]


def arrays(kind, count=60):
    images, labels = make_arrays(count)
    targets = {
        "integers": torch.from_numpy(labels),
        "bools": torch.from_numpy(labels > 0),
        "floats": torch.from_numpy(labels).float(),
    }
    return TensorDataset(torch.from_numpy(images), targets[kind])


@pytest.mark.parametrize("kind", ["integers", "bools", "floats"])
def test_arrays_of_zeros_and_ones_are_labels(kind, tmp_path):
    options = {**SETTINGS, "epochs": 1, "report": False, "log_dir": tmp_path}
    if kind == "floats":
        with pytest.raises(DataError, match=r"sample \d+ has probabilities with the sum .*set task to multi-label"):
            convolve.train(arrays(kind), "cnn-wide", **options)
        options["task"] = "multi-label"
    run = convolve.train(arrays(kind), "cnn-wide", **options)
    assert "mean_average_precision" in run.metrics["metrics"] and len(run.load().thresholds) == 3


def test_data_sets_in_python_reject_what_needs_one_class(tmp_path):
    options = {**SETTINGS, "epochs": 1, "log_dir": tmp_path}
    for given, message in (
        ({"sampler": "balanced"}, "sampler=balanced: does not apply to images with several labels"),
        ({"class_weights": "auto"}, "class_weights=auto: does not apply"),
        ({"fit_head": True}, "fit_head: features are stored by the contents of files"),
    ):
        model = "resnet20-cifar" if "fit_head" in given else "cnn-wide"
        with pytest.raises(ConfigError, match=message):
            convolve.train(arrays("integers"), model, **options, **given)


class Broken(TensorDataset):
    """One sample has another kind of target."""

    def __init__(self, target):
        super().__init__(*arrays("integers").tensors)
        self.target = target

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image, self.target if index == 11 else target


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (2, "sample 11 has one class, others are multi-label; return targets of one kind"),
        (np.array([0, 2, 1]), "sample 11 has labels other than 0 and 1"),
        (np.array([0, 1]), "sample 11 has a vector of 2 for 3 classes"),
        (np.array([[0, 1]]), "sample 11 has the label array"),
    ],
)
def test_a_wrong_target_is_an_error_with_its_index(target, message, tmp_path):
    with pytest.raises(DataError, match=message):
        convolve.train(Broken(target), "cnn-wide", log_dir=tmp_path, **SETTINGS)


class Votes:
    """Soft labels: how many of ten people named each class."""

    classes = ("dark", "gray", "bright")

    def __len__(self):
        return 80

    def __getitem__(self, index):
        level = index % 3
        share = np.full(3, 0.1, np.float32)
        share[level] = 0.8
        return np.full((16, 16, 3), 40 + 80 * level, np.uint8), share


def test_soft_labels_train_with_cross_entropy(tmp_path):
    run = convolve.train(Votes(), "cnn-wide", log_dir=tmp_path, label_smoothing=0.05, mixup_alpha=0.2, **SETTINGS)
    state = state_of(run.checkpoints[-1])
    assert state["task"] == "soft-label" and "thresholds" not in state
    assert run.metrics["test_accuracy"] == 1.0
    model = run.load()
    probabilities = model.probabilities(np.stack([Votes()[index][0] for index in range(3)]))
    assert np.allclose(probabilities.sum(1), 1, atol=1e-5) and probabilities.argmax(1).tolist() == [0, 1, 2]
    assert model.thresholds is None and model.predict(Votes()[2][0]).labels == ("bright",)
    # The lowest loss is the entropy of the votes.
    entropy = -(0.8 * np.log(0.8) + 0.2 * np.log(0.1))
    assert entropy - 1e-6 <= run.validations[-1].loss < entropy + 0.3
    assert "Calibration" in (run.path / "report.html").read_text()


def test_soft_labels_must_be_probabilities(tmp_path):
    images, labels = make_arrays(20, seed=3)
    for targets, message in (
        (labels + 0.5, "with the sum"),
        (np.full_like(labels, -1.0, float), "negative or not finite"),
        (np.full_like(labels, np.nan, float), "negative or not finite"),
    ):
        data = TensorDataset(torch.from_numpy(images), torch.from_numpy(targets).float())
        with pytest.raises(DataError, match=message):
            convolve.train(data, "cnn-wide", log_dir=tmp_path, **SETTINGS)
