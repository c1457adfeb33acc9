"""Output of commands: numbers with units, tables, JSON, lines of a run, and the end of a training."""

import json
import math
import signal
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from convolve.cli.console import (
    finish_training,
    format_bytes,
    open_console,
    print_json,
    print_result,
    print_table,
    to_plain,
)
from convolve.cli.describe import draw
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord
from convolve.loggers.run_lines import format_start
from convolve.loggers.terminal import PlainConsole, TerminalConsole
from convolve.runs.results import TrainReport

RUN = RunInfo("x", Path("runs/x"), facts={"model": "lenet5", "parameters": 61706, "dataset": "digits"})
TRAIN = TrainRecord(7, 0.5, 448, 0.1, 0.25, 0.5, 1234.0, 2.0, 0.0, 1.0)
VALID = ValidationRecord("step-000000007", 7, 0.5, 0.2, 0.875, 297, 0.5, 594.0)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1550, "1.6 kB"),
        (900 * 10**6, "900.0 MB"),
        (15 * 10**8, "1.5 GB"),
        (10**13, "10000.0 GB"),
    ],
)
def test_bytes_have_a_decimal_unit(count, text):
    assert format_bytes(count) == text


class Color(Enum):
    RED = 1


@dataclass
class Inner:
    path: Path
    values: tuple[float, ...]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (math.nan, None),
        (math.inf, None),
        (1.5, 1.5),
        (True, True),
        (None, None),
        (Path("a/b"), "a/b"),
        (Color.RED, "RED"),
        ({1: (2, -math.inf)}, {"1": [2, None]}),
        (Inner(Path("x"), (1.0, math.nan)), {"path": "x", "values": [1.0, None]}),
        ([Inner(Path("x"), ())], [{"path": "x", "values": []}]),
    ],
    ids=repr,
)
def test_results_become_plain_json_types(value, plain):
    assert to_plain(value) == plain
    json.dumps(to_plain(value), allow_nan=False)


def test_json_is_one_line_and_an_object(capsys):
    print_json(Inner(Path("a\nb"), (1.0,)))
    assert capsys.readouterr().out == '{"path": "a\\nb", "values": [1.0]}\n'
    with pytest.raises(AssertionError, match="an object"):
        print_json([1])


def test_a_result_is_printed_as_text_or_as_json(capsys):
    printed = []
    print_result({"a": 1}, False, printed.append)
    assert (printed, capsys.readouterr().out) == ([{"a": 1}], "")
    print_result({"a": 1}, True, printed.append)
    assert (len(printed), capsys.readouterr().out) == (1, '{"a": 1}\n')


def test_a_table_aligns_numbers_right_and_text_left(capsys):
    print_table(("name", "count", "mixed"), [("a", 5, 1), ("long name", 12345, "x")])
    assert capsys.readouterr().out.splitlines() == [
        "name        count  mixed",
        "a               5  1",
        "long name  12,345  x",
    ]


def test_an_empty_table_has_its_headings(capsys):
    print_table(("a", "b"), [])
    assert capsys.readouterr().out.split() == ["a", "b"]


@pytest.mark.parametrize("name", ["[red]x[/red].png", "a[b].png", "[/b].png", ":x:.png", "[link=http://x]"])
def test_file_names_in_a_table_are_not_read_as_markup(name, capsys):
    print_table(("name",), [(name,)])
    assert capsys.readouterr().out == f"name\n{name}\n"


def test_a_run_starts_or_resumes():
    assert format_start(RUN) == "Training lenet5 (61,706 parameters) on digits; run folder runs/x"
    resumed = RunInfo("x", Path("runs/x"), facts=RUN.facts, restored_step=5)
    assert format_start(resumed) == "Resuming lenet5 (61,706 parameters) on digits from step 5; run folder runs/x"


def test_plain_output_has_a_line_for_each_record_and_none_for_events(capsys):
    console = PlainConsole()
    console.start(RUN)
    console.train(TRAIN)
    console.valid(VALID)
    console.event("saved", step=7)
    console.progress("train", 3, 5)
    console.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "Training lenet5 (61", "epoch 0.50: loss 0.250", "epoch 0.5: loss 0.250", 
    ]  # fmt: skip


def test_plain_progress_of_a_long_task_becomes_rare_and_has_the_time_that_is_left(capsys):
    seconds = iter(range(1000))
    console = PlainConsole(clock=lambda: next(seconds))
    for done in range(300):
        console.progress("features", done, 300)
    for done in range(101):
        console.progress("report", done, 100)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "features: 2 of 300, 4:58 min left", "features: 7 of 300, 4:53 min left", "features: 16 of 300, 4:44 min left",
    ]  # fmt: skip
    assert len(lines) < 16 and lines[-1].startswith("report: ")


def test_a_terminal_prints_validations_and_keeps_training_in_the_bar(capsys):
    console = TerminalConsole()
    console.start(RUN)
    console.progress("train", 5, 5)
    console.train(TRAIN)
    console.valid(VALID)
    console.progress("validate", 2, 2)
    console.close()
    text = " ".join(capsys.readouterr().out.split())
    assert "Training lenet5" in text and "validation 87.5% (best)" in text


@pytest.mark.parametrize("as_json", [False, True])
def test_a_console_that_is_no_terminal_is_plain(as_json):
    with open_console(as_json) as console:
        assert isinstance(console, PlainConsole)


def report(**changes):
    values = {name: None for name in TrainReport.__dataclass_fields__}
    values |= {
        "run_dir": Path("runs/x"),
        "test_accuracy": 0.9,
        "test_samples": 1234,
        "dataset": "digits",
        "metrics": {},
        "steps": 7,
    }
    values |= {"split": "test", "images_per_second": 1500.4, "ms_per_step": 2.5, "seconds": 3.25}
    return TrainReport(**{**values, **changes})


def test_a_finished_training_reports_accuracy_and_speed(capsys):
    assert finish_training(report(), as_json=False) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1,500 images/s, 2.50 ms/step, 3.2 s in total; run folder runs/x",
        "test accuracy 90.00% on 1,234 images of digits",
    ]


def test_a_training_without_validation_reports_only_its_speed(capsys):
    assert finish_training(report(test_accuracy=None), as_json=False) == 0
    assert "accuracy" not in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_training_names_the_command_that_resumes_it(capsys, number):
    assert finish_training(report(stopped_by=number), as_json=True) == 128 + number
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"Interrupted by {number.name} at step 7; resume with: convolve restore runs/x"
    assert json.loads(last)["steps"] == 7


def test_only_rank_0_reports_but_every_rank_returns_the_exit_code(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    assert finish_training(report(stopped_by=signal.SIGTERM), as_json=True) == 143
    assert capsys.readouterr().out == ""


def test_a_curve_is_drawn_from_zero_in_eighths_of_a_line():
    lines = draw([(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)], columns=3, rows=2)
    assert lines == ["        1 |  █", "          | ██", "          +---", "           02 epochs"]


def test_a_curve_of_zeros_is_drawn_empty():
    *rows, axis, _ = draw([(0.0, 0.0), (3.0, 0.0)], columns=4, rows=3)
    assert axis.endswith("+----") and all(row.endswith("|") for row in rows)
