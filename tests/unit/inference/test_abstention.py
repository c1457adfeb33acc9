"""`predict` abstains below a calibrated probability, and writes tables."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convolve.cli.main import dispatch
from convolve.cli.predict import format_csv
from convolve.config.loading import resolve
from convolve.data.lookup import load_digits
from convolve.errors import ConfigError
from convolve.inference.abstention import UNKNOWN, abstain, apply_temperature
from convolve.inference.classifier import Prediction, PredictReport
from convolve.loggers.base import SilentConsole
from convolve.report.calibration import softmax
from convolve.runs import session
from convolve.runs.calibration import read_calibration

SURE = Prediction("a.png", "cat", 0.9, {"cat": 0.9, "dog": 0.07, "cow": 0.03})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("abstention") / "run"
    given = {"epochs": 2, "threads": 1, "run_dir": folder, "curves": False}
    session.train(resolve("lenet-digits", None, given).config, SilentConsole())
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    test = load_digits().test
    for number in range(4):
        Image.fromarray(test.images[number, :, :, 0]).save(folder / f"{number}, ü.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_temperature_of_probabilities_is_that_of_logits(temperature: float) -> None:
    logits = np.array([[2.0, -1.0, 0.5]], np.float32)
    before = dict(zip("abc", map(float, softmax(logits)[0]), strict=True))
    after = softmax(logits, temperature)[0]
    assert list(apply_temperature(before, temperature).values()) == pytest.approx([*map(float, after)], abs=1e-6)


def test_unsure_predictions_become_unknown_and_keep_their_classes() -> None:
    report = PredictReport([SURE], {}, "torch")
    assert abstain(report, 0.89, 1.0).predictions[0].label == "cat"
    [flat] = abstain(report, 0.89, 3.0).predictions
    assert flat.label == UNKNOWN and list(flat.probabilities) == ["cat", "dog", "cow"] and flat.probability < 0.89


def test_probabilities_of_zero_are_survived() -> None:
    assert apply_temperature({"a": 1.0, "b": 0.0}, 2.0)["a"] == pytest.approx(1.0)


def test_a_table_has_a_column_for_each_class_and_a_row_for_each_error() -> None:
    report = PredictReport([SURE], {"b,.png": 'a "bad" file'}, "torch")
    rows = list(csv.DictReader(io.StringIO(format_csv(report, 4))))
    assert list(rows[0].values()) == ["a.png", "cat", "cat", "0.9000", "dog", "0.0700", "cow", "0.0300", "", "", ""]
    assert rows[1]["file"] == "b,.png" and rows[1]["error"] == 'a "bad" file'


def test_training_stores_its_temperature_and_predict_uses_it(
    run: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = read_calibration(run)
    assert calibration is not None and calibration.images == 297
    table = tmp_path / "table.csv"
    words = ["predict", str(run), str(images), "--csv", "--top", "2", "--output", str(table), "--abstain", "0.999999"]
    assert dispatch(words) == 1
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["file"]).name for row in rows] == ["0, ü.png", "1, ü.png", "2, ü.png", "3, ü.png", "broken.png"]
    assert {row["class"] for row in rows[:4]} == {UNKNOWN} and rows[4]["error"]
    assert "class_3" not in rows[0] and float(rows[0]["probability_1"]) >= float(rows[0]["probability_2"])
    capsys.readouterr()
    dispatch(["predict", str(run), str(images), "--json", "--abstain", "0.1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["predictions"]
    assert UNKNOWN not in {one["label"] for one in found} and len(found[0]["probabilities"]) == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--abstain", "80"], "--abstain 80: must be between 0 and 1, such as 0.8"),
        (["--top", "0"], "--top 0: must be at least 1"),
        (["--csv", "--json"], "--csv and --json: choose one format"),
        (["--output", "x.csv"], "--output x.csv: only with --csv"),
    ],
)
def test_wrong_options_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dispatch(["predict", "run", "image.png", *words])
    assert str(caught.value) == message


def test_a_run_without_a_temperature_gets_one_from_its_report(
    run: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "calibration.json").write_text('{"temperature": -1}')
    with pytest.raises(ConfigError, match=r"has no calibration.json; write it with `convolve report"):
        dispatch(["predict", str(run), str(images), "--abstain", "0.5"])
    assert dispatch(["report", str(run)]) == 0
    assert read_calibration(run) is not None
