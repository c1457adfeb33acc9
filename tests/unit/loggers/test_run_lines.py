"""Lines of a run in the terminal and in log files."""

from pathlib import Path

import pytest

from convolve.cli.console import finish_training
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord
from convolve.loggers.run_lines import RunLines, format_seconds, format_start
from convolve.runs.results import TrainReport


def validation(checkpoint: str, step: int, accuracy: float, loss: float = 0.5) -> ValidationRecord:
    return ValidationRecord(checkpoint, step, step / 10, loss, accuracy, 100, 2.0, 50.0)


def train_record(step: int) -> TrainRecord:
    return TrainRecord(step, step / 10, 32 * step, 1e-3, 0.4321, 0.9, 41.0, 100.0, 0.0, 3.0)


def result(**given: object) -> TrainReport:
    values: dict[str, object] = {
        "run_dir": Path("runs/flowers-1"),
        "test_accuracy": 0.931,
        "test_samples": 300,
        "images_per_second": 0.0,
        "ms_per_step": 0.0,
        "seconds": 1.0,
        "steps": 7,
        "final_loss": None,
        "dataset": "pictures",
        "chance": 0.2,
    }
    return TrainReport(**{**values, **given})  # type: ignore[arg-type]


def test_an_epoch_has_one_line_with_the_better_of_weights_and_average() -> None:
    lines = RunLines(photos=True)
    lines.start(RunInfo("flowers-1", Path("runs/flowers-1"), {"ema_decay": 0.9}))
    first = lines.valid(validation("step-000000000", 0, 0.9))
    assert first == "classifier on frozen features: validation 90.0% (best), 2 s"
    lines.progress(0, 640)
    lines.train(train_record(10))
    assert lines.valid(validation("step-000000010", 10, 0.95)) is None
    line = lines.valid(validation("step-000000010-ema", 10, 0.94))
    assert line is not None and line.startswith("epoch 1: loss 0.432, validation 95.0% (best), 41 photos/s")
    assert len(line) <= 80


@pytest.mark.parametrize("select_by, marks", [("accuracy", [True, False, True]), ("loss", [True, True, False])])
def test_a_line_marks_the_best_validation_by_what_selects(select_by: str, marks: list[bool]) -> None:
    lines = RunLines()
    facts = {"model": "lenet5", "parameters": 5, "dataset": "digits"}
    lines.start(RunInfo("x", Path("runs/x"), {"select_by": select_by}, facts))
    printed = []
    for step, accuracy, loss in ((10, 0.90, 0.4), (20, 0.89, 0.3), (30, 0.91, 0.5)):
        lines.train(train_record(step))
        printed.append(lines.valid(validation(f"step-{step:09d}", step, accuracy, loss)))
    assert ["(best)" in (line or "") for line in printed] == marks


@pytest.mark.parametrize("select_by, shown", [("accuracy", "95.0%"), ("loss", "94.0%")])
def test_a_line_shows_the_weights_or_the_average_by_what_selects(select_by: str, shown: str) -> None:
    lines = RunLines(photos=True)
    lines.start(RunInfo("flowers-1", Path("runs/flowers-1"), {"ema_decay": 0.9, "select_by": select_by}))
    lines.progress(0, 640)
    lines.train(train_record(10))
    lines.valid(validation("step-000000010", 10, 0.95, 0.4))
    assert f"validation {shown}" in str(lines.valid(validation("step-000000010-ema", 10, 0.94, 0.3)))


def test_result_is_one_line_with_chance_and_interval(capsys: pytest.CaptureFixture[str]) -> None:
    finish_training(result(), as_json=False)
    assert capsys.readouterr().out == (
        "accuracy 93.1% (chance 20%, 300 photos, +/-2.9) - open runs/flowers-1/report.html, "
        "try: convolve serve runs/flowers-1\n"
    )


def test_early_end_is_printed_before_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    finish_training(result(stopped_early="time budget"), as_json=False)
    assert capsys.readouterr().out.startswith("stopped after 7 steps: time budget\naccuracy")


@pytest.mark.parametrize("seconds, text", [(45.2, "45 s"), (200, "3:20 min"), (7500, "2:05 h")])
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_plain_output_has_a_line_for_each_quarter_of_an_epoch_and_one_for_the_epoch() -> None:
    lines = RunLines()
    lines.start(RunInfo("x", Path("runs/x"), {}, {"model": "lenet5", "parameters": 5, "dataset": "digits"}))
    lines.progress(0, 640)
    printed = []
    for step in range(1, 21):
        record = train_record(step)
        printed.append(lines.train(record) or lines.epoch(record))
        if step % 10 == 0:
            printed.append(lines.valid(validation(f"step-{step:09d}", step, 0.5)))
    shown = [line.split(":")[0] for line in printed if line]
    assert shown == [
        "epoch 0.30",
        "epoch 0.50",
        "epoch 0.80",
        "epoch 1",
        "epoch 1.30",
        "epoch 1.50",
        "epoch 1.80",
        "epoch 2",
    ]
    assert all(len(line) <= 80 for line in printed if line)


def test_epochs_between_validations_have_a_line_too() -> None:
    lines = RunLines()
    facts = {"model": "lenet5", "parameters": 5, "dataset": "digits"}
    lines.start(RunInfo("x", Path("runs/x"), {"validation_frequency": 2.0}, facts))
    lines.progress(0, 32 * 30)
    printed = []
    for step in range(1, 31):
        record = train_record(step)
        lines.train(record)
        printed.append(lines.epoch(record))
        if step in (20, 30):
            printed.append(lines.valid(validation(f"step-{step:09d}", step, 0.5)))
    shown = [(line.split(":")[0], "validation" in line) for line in printed if line]
    assert shown == [("epoch 1", False), ("epoch 2", True), ("epoch 3", True)]


def test_a_run_without_validation_has_a_line_for_each_epoch_too() -> None:
    lines = RunLines()
    facts = {"model": "lenet5", "parameters": 5, "dataset": "digits"}
    lines.start(RunInfo("x", Path("runs/x"), {"validation_mode": "none"}, facts))
    printed = [lines.epoch(train_record(step)) for step in range(1, 31)]
    assert [line for line in printed if line] == [f"epoch {number}: loss 0.432, 41 images/s" for number in (1, 2, 3)]


def test_validations_after_training_are_named_by_their_checkpoint() -> None:
    lines = RunLines()
    lines.start(RunInfo("x", Path("runs/x"), {}, {"model": "lenet5", "parameters": 5, "dataset": "digits"}))
    lines.train(train_record(30))
    assert lines.valid(validation("step-000000010", 10, 0.5)) == "step-000000010: validation 50.0%, loss 0.500"
    assert lines.valid(validation("mean", 30, 0.75)) == "mean: validation 75.0%, loss 0.500"


def test_a_long_first_line_becomes_two() -> None:
    facts = {"model": "efficientnet-lite0", "parameters": 3_377_413, "dataset": "imagenet"}
    first = format_start(RunInfo("x", Path("runs/a-long-name-of-a-run-1"), {}, facts))
    assert first.splitlines() == [
        "Training efficientnet-lite0 (3,377,413 parameters) on imagenet",
        "run folder runs/a-long-name-of-a-run-1",
    ]


def test_a_validation_outside_of_a_run_names_its_checkpoint() -> None:
    line = RunLines().valid(validation("step-000000010", 10, 0.5))
    assert line is not None and line.startswith(
        "validation of step-000000010, epoch 1.00, loss 0.5000, accuracy 50.00%"
    )
