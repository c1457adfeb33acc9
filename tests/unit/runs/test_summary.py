"""Figures are correct, carry their unit and name what they omit; curves are drawn from the tables alone."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from convolve.errors import ConvolveError
from convolve.loggers.base import TrainRecord, ValidationRecord
from convolve.loggers.files import CsvLogger
from convolve.report.curves_png import draw_curves
from convolve.runs.summary import OPTIONAL, REQUIRED, case_name, write_summary

FIGURES = {
    "network": "lenet5",
    "batch_size": 64,
    "device_type": "cpu",
    "case_name": case_name("lenet5", 64, 1, "acc"),
    "images_per_second": 12345.6,
    "ms_per_step": 5.2,
    "first_excluded": True,
    "data_wait_included": True,
    "test_accuracy": 0.9912,
    "test_samples": 10000,
    "final_loss": 0.02,
    "end_to_end_seconds": 31.5,
}


def test_the_summary_holds_every_figure_in_the_order_of_the_schema(tmp_path: Path) -> None:
    path = write_summary(tmp_path, {"steps": 7, **FIGURES})
    content = json.loads(path.read_text())
    assert path.name == "summary.json" and content == {**FIGURES, "steps": 7}
    assert list(content) == [*REQUIRED, "steps"]
    assert content["case_name"] == "lenet5_bs64_1p_acc"


def test_figures_that_were_not_measured_are_null(tmp_path: Path) -> None:
    path = write_summary(tmp_path, {**FIGURES, "test_accuracy": None, "final_loss": math.nan})
    content = json.loads(path.read_text())
    assert content["test_accuracy"] is None and content["final_loss"] is None


def test_a_missing_unknown_or_impossible_figure_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConvolveError, match="ms_per_step missing"):
        write_summary(tmp_path, {name: value for name, value in FIGURES.items() if name != "ms_per_step"})
    with pytest.raises(ConvolveError, match="image_per_second .*did you mean images_per_second"):
        write_summary(tmp_path, {**FIGURES, "image_per_second": 1})
    with pytest.raises(ConvolveError, match=r"test_accuracy=99.12: must be in \[0, 1\]"):
        write_summary(tmp_path, {**FIGURES, "test_accuracy": 99.12})
    assert list(tmp_path.iterdir()) == []


def test_a_run_writes_every_declared_key(digits_run: Path) -> None:
    """But for `weights` and `labels`, which only runs with published weights or with several labels have."""
    written = set(json.loads((digits_run / "summary.json").read_text()))
    assert written == {*REQUIRED, *OPTIONAL} - {"weights", "labels"}


def test_every_key_of_the_summary_is_explained_once() -> None:
    assert not set(REQUIRED) & set(OPTIONAL)
    assert all({**REQUIRED, **OPTIONAL}.values())


def write_tables(folder: Path, *, metrics: bool = True, steps: int = 40, validations: int = 4) -> None:
    writer = CsvLogger.open(folder)
    for step in range(1, steps + 1):
        loss = 2.3 / step if metrics else None
        accuracy = 1 - 0.9 / step if metrics else None
        writer.train(TrainRecord(step, step / 10, step, 0.1 / step, loss, accuracy, 1.0, 1.0, 0.0, 1.0))
    for number in range(1, validations + 1):
        writer.valid(ValidationRecord(f"step-{number}", number * 10, number, 0.5 / number, 0.9, 100, 1.0, 100.0))
    writer.close()


def count_color(path: Path, color: tuple[int, int, int]) -> int:
    with Image.open(path) as image:
        counts = image.convert("RGB").getcolors(2**24) or []
    return sum(count for count, found in counts if found == color)


@pytest.mark.parametrize(
    "shape",
    [{}, {"metrics": False}, {"steps": 1, "validations": 0}, {"steps": 0}, {"steps": 1, "validations": 1}],
    ids=["all", "no metrics", "one row", "validation only", "one of each"],
)
def test_curves_show_what_the_tables_have(shape: dict[str, int], tmp_path: Path) -> None:
    write_tables(tmp_path, **shape)  # type: ignore[arg-type]
    path = draw_curves(tmp_path)
    assert path == tmp_path / "curves.png"
    validated = shape.get("validations", 4) > 0
    assert (count_color(path, (0xE4, 0x57, 0x2E)) > 0) == validated
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def test_a_run_that_diverged_is_drawn_as_far_as_its_numbers_go(tmp_path: Path) -> None:
    writer = CsvLogger.open(tmp_path)
    for step, loss in enumerate([2.3, 1e30, math.inf, math.nan], 1):
        writer.train(TrainRecord(step, step, step, 0.1, loss, 0.1, 1.0, 1.0, 0.0, 1.0))
    writer.close()
    assert draw_curves(tmp_path).stat().st_size > 10_000


def test_a_name_that_looks_like_a_formula_is_written_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "a$_{\\frac$"
    folder.mkdir()
    write_tables(folder)
    draw_curves(folder)


def test_curves_without_rows_are_rejected_and_a_bad_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConvolveError, match="nothing to draw"):
        draw_curves(tmp_path)
    (tmp_path / "training.csv").write_text("epoch,loss,accuracy,learning_rate\n1,2,0.5,0.1\n2,oops,0.5,0.1\n")
    with pytest.raises(ConvolveError, match="training.csv: line 3 has no number for epoch or loss"):
        draw_curves(tmp_path)


def test_drawing_touches_no_global_state_of_matplotlib(tmp_path: Path) -> None:
    write_tables(tmp_path)
    draw_curves(tmp_path)
    script = "import sys, convolve.report.curves_png; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(filter(None, sys.path))}).returncode
        == 0
    )
