"""After a restore the tables read like those of a run that never stopped."""

import json
from pathlib import Path

import pytest

from convolve.config import LogConfig
from convolve.errors import ConvolveError
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord
from convolve.loggers.files import open_loggers, read_table, read_validations, truncate_after


def write(folder: Path, steps: range, restored: int | None = None) -> None:
    """A run of ten steps per epoch that logs every step and validates every fifth."""
    with open_loggers(LogConfig(), folder) as writers:
        writers.start(RunInfo("x", folder, restored_step=restored))
        for step in steps:
            writers.train(TrainRecord(step, step / 10, step * 8, 0.1, 1 / step, 0.5, 100.0, 80.0, 0.0, step / 10))
            if step % 5 == 0:
                writers.valid(ValidationRecord(f"step-{step:09d}", step, step / 10, 1 / step, 0.9, 100, 1.0, 100.0))


def tables(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("training.csv", "validation.csv")]


@pytest.mark.parametrize("stopped", [10, 13, 15, 19])
def test_a_restored_run_has_the_tables_of_an_unbroken_one(stopped: int, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    write(whole, range(1, 21))
    write(broken, range(1, stopped + 1))
    truncate_after(broken, 10)
    write(broken, range(11, 21), restored=10)
    assert tables(broken) == tables(whole)


def test_events_keep_everything_and_note_the_restore(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    before = (tmp_path / "events.jsonl").read_bytes()
    truncate_after(tmp_path, 3)
    after = (tmp_path / "events.jsonl").read_bytes()
    assert after.startswith(before)
    [line] = after[len(before) :].splitlines()
    assert json.loads(line)["kind"] == "restored" and json.loads(line)["step"] == 3


def test_a_torn_last_row_is_dropped_with_the_rest(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    whole = tables(tmp_path)[0]
    (tmp_path / "training.csv").write_bytes(whole + b"8,0.8,6")
    truncate_after(tmp_path, 7)
    assert tables(tmp_path)[0] == whole


def test_rewinding_a_folder_without_tables_makes_none(tmp_path: Path) -> None:
    truncate_after(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []


def test_rewinding_to_the_end_leaves_the_file_alone(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    before = (tmp_path / "training.csv").stat()
    truncate_after(tmp_path, 7)
    after = (tmp_path / "training.csv").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_row_without_a_step_is_named_and_nothing_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "training.csv").write_text("step,loss\n1,2\nx,3\n")
    with pytest.raises(ConvolveError, match="training.csv: a row has no step"):
        truncate_after(tmp_path, 0)
    assert (tmp_path / "training.csv").read_text() == "step,loss\n1,2\nx,3\n"


def test_validations_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    assert read_validations(tmp_path) == []
    write(tmp_path, range(1, 12))
    assert read_validations(tmp_path) == [
        ValidationRecord(f"step-{step:09d}", step, step / 10, 1 / step, 0.9, 100, 1.0, 100.0) for step in (5, 10)
    ]


@pytest.mark.parametrize("row", ["x", "step-000000005,5,0.5", "step-000000005,five,0.5,0.2,0.9,100,1.0,100.0"])
def test_a_row_that_is_no_validation_is_named(row: str, tmp_path: Path) -> None:
    write(tmp_path, range(1, 2))
    with (tmp_path / "validation.csv").open("a") as file:
        file.write(f"{row}\n")
    with pytest.raises(ConvolveError, match="validation.csv: a row is not a validation"):
        read_validations(tmp_path)


def test_a_table_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "training.csv").write_bytes(b"step\n\xff\xfe\n")
    with pytest.raises(ConvolveError, match="training.csv: cannot read as a table"):
        read_table(tmp_path / "training.csv")
