"""Records as text, JSON and plotted numbers; groups of loggers; tables read back."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convolve.config import LogConfig
from convolve.errors import ConvolveError
from convolve.loggers.base import (
    Logger,
    LoggerGroup,
    RunInfo,
    SilentConsole,
    TrainRecord,
    ValidationRecord,
    format_event,
    scalars,
    timestamp,
    to_json,
)
from convolve.loggers.files import encode_event, open_loggers, read_points, read_table, read_validations
from convolve.loggers.mlperf import MlperfLogger

TRAIN = TrainRecord(10, 0.5, 640, 0.1, 0.25, 0.9, 1000.0, 5.0, 0.1, 2.0)
VALID = ValidationRecord("step-000000010", 10, 0.5, 0.2, 0.95, 100, 1.0, 100.0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (-math.inf, None),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (True, True),
        (Path("a") / "b", "a/b"),
        ({1: [math.inf, "x"]}, {"1": [None, "x"]}),
        ((1, (2.5, None)), [1, [2.5, None]]),
        (torch.float16, "torch.float16"),
    ],
    ids=repr,
)
def test_any_value_becomes_standard_json(value, expected):
    assert to_json(value) == expected
    assert type(to_json(value)) is type(expected)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_an_event_is_one_line_of_strict_json_for_any_details(details):
    line = encode_event("saved", details=details)
    assert len(line.splitlines()) == 1
    event = json.loads(line, parse_constant=pytest.fail)
    assert event["kind"] == "saved" and event["details"] == to_json(details)


def test_an_event_is_readable_text():
    assert format_event("saved", {}) == "saved"
    assert format_event("saved", {"step": 3, "loss_scale": 128.0}) == "saved, step 3, loss scale 128.0"


def test_plotted_numbers_have_neither_the_step_nor_the_checkpoint_nor_absent_metrics():
    assert "step" not in scalars(TRAIN) and scalars(TRAIN)["loss"] == 0.25
    assert set(scalars(VALID)) == {"epoch", "loss", "accuracy", "samples", "seconds", "images_per_second"}
    without = TrainRecord(10, 0.5, 640, 0.1, None, None, 1000.0, 5.0, 0.1, 2.0)
    assert set(scalars(TRAIN)) - set(scalars(without)) == {"loss", "accuracy"}


def test_times_are_utc_with_milliseconds():
    date, _, clock = timestamp().partition("T")
    assert len(date) == 10 and len(clock) == len("12:34:56.789+00:00") and clock.endswith("+00:00")


class Recording(Logger):
    """Logger that records its calls, and may fail when it is closed."""

    def __init__(self, calls, name, error=None):
        self.calls, self.name, self.error = calls, name, error

    def train(self, record):
        self.calls.append((self.name, "train", record.step))

    def event(self, kind, **details):
        self.calls.append((self.name, kind, details))

    def close(self):
        self.calls.append((self.name, "close"))
        if self.error is not None:
            raise self.error


def test_a_group_forwards_in_order_and_closes_all_loggers_when_one_fails():
    calls = []
    group = LoggerGroup(
        [Recording(calls, "a"), Recording(calls, "b", ConvolveError("disk full")), Recording(calls, "c")]
    )
    with pytest.raises(ConvolveError, match="disk full"), group:
        group.start(RunInfo("x", Path()))
        group.train(TRAIN)
        group.event("saved", step=1)
    assert calls[:3] == [(name, "train", 10) for name in "abc"]
    assert calls[3:6] == [(name, "saved", {"step": 1}) for name in "abc"]
    assert {call for call in calls[6:]} == {(name, "close") for name in "abc"}


def test_a_silent_console_accepts_every_call_and_prints_nothing(capsys):
    console = SilentConsole()
    console.start(RunInfo("x", Path()))
    console.train(TRAIN)
    console.valid(VALID)
    console.event("saved", step=1)
    console.info("line")
    console.progress("train", 1, None)
    console.close()
    assert capsys.readouterr() == ("", "")


def test_points_are_read_in_order_of_epochs_without_gaps_and_non_finite_values(tmp_path):
    table = tmp_path / "training.csv"
    table.write_text("epoch,loss,accuracy\n2.0,0.5,\n1.0,nan,0.1\n0.5,0.75,0.2\n3.0,inf,0.3\n")
    assert read_points(table, "loss") == [(0.5, 0.75), (2.0, 0.5)]
    assert read_points(table, "accuracy") == [(0.5, 0.2), (1.0, 0.1), (3.0, 0.3)]


def test_points_of_a_table_that_does_not_exist_are_none(tmp_path):
    assert read_points(tmp_path / "training.csv", "loss") == []
    assert read_table(tmp_path / "training.csv") == []


@pytest.mark.parametrize(
    ("text", "line"),
    [("epoch,loss\n1,2\n2,x\n", 3), ("epoch,loss\nx,2\n", 2), ("epoch,accuracy\n1,2\n", 2), ("epoch,loss\n1\n", 2)],
)
def test_a_point_that_is_no_number_is_named_by_its_line(text, line, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConvolveError, match=f"t.csv: line {line} has no number for epoch or loss; fix it or move"):
        read_points(tmp_path / "t.csv", "loss")


@given(st.lists(st.builds(
    ValidationRecord,
    st.text(st.characters(exclude_categories=("C", "Z")), min_size=1),
    st.integers(0, 2**40),
    *[st.floats(allow_nan=False)] * 3,
    st.integers(0, 2**40),
    *[st.floats(allow_nan=False)] * 2,
), max_size=4))  # fmt: skip
def test_any_validations_are_read_back_as_they_were_written(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("run")
    with open_loggers(LogConfig(), folder) as loggers:
        for record in records:
            loggers.valid(record)
    assert read_validations(folder) == records


FACTS = {"training_images": 1000, "test_images": 100, "global_batch_size": 50}


def mlperf_lines(path):
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def test_a_restored_mlperf_log_has_one_header_and_starts_its_block_at_the_restored_epoch(tmp_path):
    path = tmp_path / "result_0.txt"
    config = {"validation_mode": "during", "validation_frequency": 2.0, "seed": 3}
    for restored in (None, 30):
        logger = MlperfLogger.open(path)
        logger.start(RunInfo("x", tmp_path, config, FACTS, restored_step=restored))
        logger.train(TRAIN)
        logger.event("end", status="success" if restored else "aborted")
        logger.close()
    lines = mlperf_lines(path)
    assert [line["key"] for line in lines].count("run_start") == 1
    blocks = [line["metadata"] for line in lines if line["key"] == "block_start"]
    assert blocks == [{"first_epoch_num": first, "epoch_count": 2.0} for first in (0.0, 30 * 50 / 1000)]
    statuses = [line["metadata"]["status"] for line in lines if line["key"] == "run_stop"]
    assert statuses == ["aborted", "success"]


def test_an_mlperf_block_ends_when_its_validation_starts(tmp_path):
    logger = MlperfLogger.open(tmp_path / "log.txt")
    logger.start(RunInfo("x", tmp_path, {"validation_mode": "after", "epochs": 8}, FACTS))
    logger.train(TRAIN)
    logger.valid(VALID)
    logger.event("saved", step=3)
    logger.event("end", status="success")
    logger.close()
    lines = mlperf_lines(tmp_path / "log.txt")
    keys = [line["key"] for line in lines]
    last = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop"]
    assert keys[-6:] == last
    times = {line["key"]: line["time_ms"] for line in lines}
    assert times["block_stop"] == times["eval_start"] <= times["eval_stop"]
    assert next(line for line in lines if line["key"] == "block_start")["metadata"]["epoch_count"] == 8.0
    assert next(line for line in lines if line["key"] == "eval_accuracy")["value"] == 0.95
