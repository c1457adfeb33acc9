"""Loggers write complete lines, even if the process is killed."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from convolve.config import LogConfig
from convolve.errors import ConvolveError, ExtraError
from convolve.loggers.base import LoggerGroup, RunInfo, TrainRecord, ValidationRecord
from convolve.loggers.files import CsvLogger, JsonlLogger, TextLogger, open_loggers, read_training, read_validations

TRAIN = TrainRecord(
    step=100,
    epoch=0.1 + 0.2,
    samples=6400,
    learning_rate=1e-3,
    loss=0.25,
    accuracy=0.9312,
    images_per_second=12345.6,
    ms_per_step=5.18,
    data_wait_share=0.03,
    total_seconds=1.5,
)
VALID = ValidationRecord(
    checkpoint="step-000000100",
    step=100,
    epoch=1.0,
    loss=0.2,
    accuracy=0.9876,
    samples=10000,
    seconds=0.5,
    images_per_second=20000.0,
)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def events(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_csv_rows_give_back_every_number_exactly(tmp_path: Path) -> None:
    writer = CsvLogger.open(tmp_path)
    writer.train(TRAIN)
    writer.valid(VALID)
    [train] = read(tmp_path / "training.csv")
    [valid] = read(tmp_path / "validation.csv")
    assert {**{name: float(cell) for name, cell in train.items()}, "metrics": {}} == vars(TRAIN)
    assert valid.pop("checkpoint") == VALID.checkpoint
    assert all(float(cell) == getattr(VALID, name) for name, cell in valid.items())
    writer.close()


def test_the_metrics_of_a_user_are_the_last_columns_and_are_read_back(tmp_path: Path) -> None:
    writer = CsvLogger.open(tmp_path, ["certain", "top_5"])
    train, valid = (
        replace(TRAIN, metrics={"top_5": 0.5, "certain": 0.1 + 0.2}),
        replace(VALID, metrics={"certain": 1.0}),
    )
    writer.train(train)
    writer.valid(valid)
    writer.close()
    assert list(read(tmp_path / "training.csv")[0])[-2:] == ["certain", "top_5"]
    assert read_training(tmp_path) == [train]
    assert read_validations(tmp_path) == [valid]


def test_metrics_that_are_off_are_empty_cells_and_nan_stays_nan(tmp_path: Path) -> None:
    writer = CsvLogger.open(tmp_path)
    writer.train(replace(TRAIN, loss=None, accuracy=None))
    writer.train(replace(TRAIN, loss=math.nan))
    writer.close()
    first, second = read(tmp_path / "training.csv")
    assert (first["loss"], first["accuracy"], second["loss"]) == ("", "", "nan")


def test_the_header_is_written_once_over_many_openings(tmp_path: Path) -> None:
    for _ in range(3):
        writer = CsvLogger.open(tmp_path)
        writer.train(TRAIN)
        writer.close()
    assert (tmp_path / "training.csv").read_text().count("samples") == 1
    assert len(read(tmp_path / "training.csv")) == 3


def test_a_table_with_other_columns_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "training.csv").write_text("iteration,loss\n1,2\n")
    with pytest.raises(ConvolveError, match="training.csv: has the columns 'iteration,loss'"):
        CsvLogger.open(tmp_path)
    assert (tmp_path / "training.csv").read_text() == "iteration,loss\n1,2\n"


def test_every_line_of_events_is_one_strict_json_object_with_kind_and_time(tmp_path: Path) -> None:
    writer = JsonlLogger.open(tmp_path)
    writer.start(RunInfo("lenet5-1", tmp_path, {"epochs": 2.0}, {"network": "lenet5"}))
    writer.train(replace(TRAIN, loss=math.inf))
    writer.valid(VALID)
    writer.event("saved", checkpoint="step-1\nline", path=tmp_path, share=math.nan, many=(1, 2))
    writer.close()
    found = events(tmp_path)
    assert [event["kind"] for event in found] == ["start", "train", "valid", "saved"]
    assert all(str(event["time"]).endswith("+00:00") for event in found)
    assert found[0]["config"] == {"epochs": 2.0}
    assert found[1]["loss"] is None and found[1]["accuracy"] == TRAIN.accuracy
    assert found[3]["checkpoint"] == "step-1\nline"
    assert (found[3]["path"], found[3]["share"], found[3]["many"]) == (str(tmp_path), None, [1, 2])


def test_the_text_log_reads_as_sentences_one_per_line(tmp_path: Path) -> None:
    writer = TextLogger.open(tmp_path)
    writer.start(RunInfo("lenet5-1", tmp_path, facts={"network": "lenet5"}))
    writer.train(TRAIN)
    writer.train(replace(TRAIN, loss=None, accuracy=None))
    writer.valid(VALID)
    writer.event("stopped", reason="first\nsecond")
    writer.start(RunInfo("lenet5-1", tmp_path, restored_step=100))
    writer.close()
    lines = [line.split("  ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert lines == [
        "run lenet5-1 starts, network lenet5",
        "step 100, epoch 0.30, loss 0.2500, accuracy 93.12%, learning rate 0.001, "
        "12,346 images/s, 5.18 ms/step, waiting for data 3%",
        "step 100, epoch 0.30, learning rate 0.001, 12,346 images/s, 5.18 ms/step, waiting for data 3%",
        "validation of step-000000100, epoch 1.00, loss 0.2000, accuracy 98.76% of 10,000 images, "
        "0.50 s, 20,000 images/s",
        "stopped, reason first second",
        "run lenet5-1 resumes from step 100",
    ]


def test_a_record_is_in_the_file_before_the_writer_is_closed(tmp_path: Path) -> None:
    with open_loggers(LogConfig(), tmp_path) as writers:
        writers.train(TRAIN)
        assert len(read(tmp_path / "training.csv")) == 1
        assert len(events(tmp_path)) == 1
        assert "step 100" in (tmp_path / "log.txt").read_text()


def test_a_run_without_logs_has_writers_that_write_nothing(tmp_path: Path) -> None:
    for writers in (LoggerGroup([]), open_loggers(LogConfig(logs=False), tmp_path)):
        writers.start(RunInfo("x", tmp_path))
        writers.train(TRAIN)
        writers.valid(VALID)
        writers.event("saved")
        writers.close()
    assert list(tmp_path.iterdir()) == []


class Failing(TextLogger):
    def close(self) -> None:
        super().close()
        raise ConvolveError("no")


def test_all_writers_are_closed_also_when_one_fails(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    table = CsvLogger.open(tmp_path)
    writers = LoggerGroup([table, Failing.open(tmp_path / "a"), JsonlLogger.open(tmp_path)])
    with pytest.raises(ConvolveError, match="no"):
        writers.close()
    with pytest.raises(ValueError, match="closed"):
        table.train(TRAIN)


FOREVER = """
import sys
from pathlib import Path
from convolve.config import LogConfig
from convolve.loggers.base import TrainRecord
from convolve.loggers.files import open_loggers

writers = open_loggers(LogConfig(), Path(sys.argv[1]))
step = 0
while True:
    step += 1
    writers.train(TrainRecord(step, step / 7, step, 0.1, 1 / step, None, 1.0, 1.0, 0.0, 1.0))
"""


def test_a_killed_process_leaves_whole_lines_only(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen([sys.executable, "-c", FOREVER, str(tmp_path)], env=environment)
    table = tmp_path / "training.csv"
    while not table.exists() or table.stat().st_size < 20_000:
        assert child.poll() is None, "the writing process ended by itself"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    rows = read(table)
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    assert all(float(row["total_seconds"]) == 1.0 for row in rows)
    assert len(events(tmp_path)) in (len(rows), len(rows) - 1)
    assert (tmp_path / "log.txt").read_bytes().endswith(b"\n")


def test_a_line_torn_by_a_power_cut_is_cut_off_before_more_is_written(tmp_path: Path) -> None:
    writer = CsvLogger.open(tmp_path)
    writer.train(TRAIN)
    writer.close()
    path = tmp_path / "training.csv"
    whole = path.read_bytes()
    for torn in (b"101,0.3", b"x"):
        path.write_bytes(whole + torn)
        CsvLogger.open(tmp_path).close()
        assert path.read_bytes() == whole
    path.write_bytes(b"step,ep")
    CsvLogger.open(tmp_path).close()
    assert path.read_bytes() == whole.splitlines(keepends=True)[0]


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConvolveError, match="none.training.csv: cannot write"):
        CsvLogger.open(tmp_path / "none")


def test_a_line_that_does_not_fit_on_the_disk_is_removed_completely(tmp_path: Path) -> None:
    import resource

    writer = TextLogger.open(tmp_path)
    writer.event("first")
    before = (tmp_path / "log.txt").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(ConvolveError, match="log.txt: cannot write"):
            writer.event("second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "log.txt").read_bytes() == before
    writer.event("third")
    writer.close()
    assert (tmp_path / "log.txt").read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("config", "module"),
    [(LogConfig(tensorboard=True), "torch.utils.tensorboard"), (LogConfig(wandb=True), "wandb")],
    ids=["tensorboard", "wandb"],
)
def test_a_missing_extra_is_named_before_the_run_starts(
    config: LogConfig, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ExtraError, match=r"needs the extra 'logs'; install it with: pip install 'convolve\[logs\]'"):
        open_loggers(config, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["training.csv", "validation.csv", "events.jsonl", "log.txt"])
def test_a_file_that_cannot_be_opened_is_named_and_the_others_are_closed(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConvolveError, match=f"{name}: cannot write"):
        open_loggers(LogConfig(), tmp_path)
