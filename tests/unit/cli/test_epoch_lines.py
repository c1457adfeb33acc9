"""Lines of a run on photos."""

from pathlib import Path

import pytest

from convolve.cli.epoch_lines import EpochLines, format_seconds, print_photo_result
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord
from convolve.runs.results import TrainReport


def validation(checkpoint: str, step: int, accuracy: float) -> ValidationRecord:
    return ValidationRecord(checkpoint, step, step / 10, 0.5, accuracy, 100, 2.0, 50.0)


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
    lines = EpochLines()
    lines.start(RunInfo("flowers-1", Path("runs/flowers-1"), {"ema_decay": 0.9}))
    first = lines.valid(validation("step-000000000", 0, 0.9))
    assert first == "classifier on frozen features: validation 90.0% (best), 2 s"
    lines.progress(0, 640)
    lines.train(train_record(10))
    assert lines.valid(validation("step-000000010", 10, 0.95)) is None
    line = lines.valid(validation("step-000000010-ema", 10, 0.94))
    assert line is not None and line.startswith("epoch 1: loss 0.432, validation 95.0% (best), 41 photos/s")
    assert len(line) <= 80


def test_result_is_one_line_with_chance_and_interval(capsys: pytest.CaptureFixture[str]) -> None:
    print_photo_result(result())
    assert capsys.readouterr().out == (
        "accuracy 93.1% (chance 20%, 300 photos, +/-2.9) - open runs/flowers-1/report.html, "
        "try: convolve serve runs/flowers-1\n"
    )


def test_early_end_is_printed_before_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    print_photo_result(result(stopped_early="time budget"))
    assert capsys.readouterr().out.startswith("stopped after 7 steps: time budget\naccuracy")


@pytest.mark.parametrize("seconds, text", [(45.2, "45 s"), (200, "3:20 min"), (7500, "2:05 h")])
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
