"""MLPerf's log of a run obeys the published rules, and the public checker where it is installed.

The rules below are written from the checker's rulesets 3.1.0 and 4.0.0: which keys there must be, how often, and in
which order their intervals open and close.
"""

import json
import signal
import subprocess
import sys

import pytest

from convolve.bench import train
from convolve.cli.main import dispatch
from convolve.loggers.base import SilentConsole
from convolve.run_files import mlperf_name
from convolve.runs import session
from digit_runs import digits_config

ONCE = {"submission_org", "submission_platform", "submission_division", "submission_status", "submission_benchmark"}
ONCE |= {"init_start", "init_stop", "run_start", "run_stop", "train_samples", "eval_samples", "global_batch_size"}
ONCE |= {"gradient_accumulation_steps", "opt_name", "seed"}
FIELDS = {"namespace", "time_ms", "event_type", "key", "value", "metadata"}


def read(folder, seed=0):
    lines = (folder / mlperf_name(seed)).read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def keys(lines):
    return [line["key"] for line in lines]


def check(lines):
    """The rules that hold for every log of a whole run."""
    found = keys(lines)
    assert all(set(line) == FIELDS for line in lines)
    assert {key: found.count(key) for key in ONCE} == dict.fromkeys(ONCE, 1)
    assert found.count("eval_accuracy") == found.count("eval_start") == found.count("eval_stop") >= 1
    assert found.count("block_start") == found.count("block_stop") >= 1
    order = [found.index(key) for key in ("init_start", "init_stop", "run_start", "block_start", "run_stop")]
    assert order == sorted(order) and found[-1] == "run_stop"
    times = [line["time_ms"] for line in lines]
    assert times == sorted(times) and all(isinstance(time, int) for time in times)
    open_intervals = []
    for line in lines:
        name = line["key"].rpartition("_")[0]
        if line["event_type"] == "INTERVAL_START":
            open_intervals.append(name)
        elif line["event_type"] == "INTERVAL_END":
            assert open_intervals.pop() == name
        if line["key"] in ("eval_start", "eval_accuracy", "eval_stop"):
            assert "epoch_num" in line["metadata"]
    assert open_intervals == []


def test_a_training_obeys_the_rules(train_digits):
    report = train_digits(mlperf_logging=True, epochs=2, batch_size=100, seed=7)
    lines = read(report.run_dir, seed=7)
    check(lines)
    values = {line["key"]: line["value"] for line in lines}
    assert values["train_samples"] == 1500 and values["eval_samples"] == 297 and values["seed"] == 7
    assert values["global_batch_size"] == 100 and values["submission_division"] == "open"
    assert values["eval_accuracy"] == pytest.approx(report.test_accuracy)
    assert values["cache_clear"] is False
    blocks = [line["metadata"] for line in lines if line["key"] == "block_start"]
    assert blocks == [{"first_epoch_num": epoch, "epoch_count": 1.0} for epoch in (0.0, 1.0)]
    assert lines[-1]["metadata"] == {"status": "success"}


def test_without_the_option_no_log_is_written(train_digits):
    assert not (train_digits(batch_size=500).run_dir / mlperf_name(0)).exists()


def test_a_measurement_obeys_the_rules(tmp_path):
    config = digits_config(tmp_path / "run", mlperf_logging=True)
    train.bench_train(config, SilentConsole(), train.BenchPlan(1, 2, 2))
    check(read(tmp_path / "run"))


class StoppingConsole(SilentConsole):
    def progress(self, what, done, total):
        if what == "train" and done == 1000:
            signal.raise_signal(signal.SIGTERM)


def test_a_stopped_run_is_marked_and_resumes_in_the_same_log(tmp_path):

    folder = tmp_path / "run"
    session.train(digits_config(folder, mlperf_logging=True, batch_size=100), StoppingConsole())
    stopped = read(folder)
    assert stopped[-1]["metadata"] == {"status": "aborted"} and "eval_accuracy" not in keys(stopped)
    session.resume(folder, SilentConsole())
    lines = read(folder)
    assert lines[: len(stopped)] == stopped and keys(lines).count("run_start") == 1
    assert lines[-1]["metadata"] == {"status": "success"}
    block = next(line for line in lines[len(stopped) :] if line["key"] == "block_start")
    assert block["metadata"]["first_epoch_num"] == pytest.approx(1100 / 1500)  # the step after the signal


def checker(path):
    words = ["-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "4.0.0"]
    return subprocess.run(
        [sys.executable, *words, str(path)], cwd=path.parent, capture_output=True, text=True, check=False
    )


def test_the_public_checker_takes_the_logs(train_digits, tmp_path):
    pytest.importorskip("mlperf_logging", reason="the package mlperf-logging is not installed")
    report = train_digits(mlperf_logging=True, batch_size=100)
    words = ["--config", "lenet-digits", "--threads", "1", "--repeats", "2", "--run-steps", "2", "--mlperf-logging"]
    assert dispatch(["bench", "train", *words, "--run-dir", str(tmp_path / "bench"), "--json"]) == 0
    for folder in (report.run_dir, tmp_path / "bench"):
        done = checker(folder / mlperf_name(0))
        assert done.returncode == 0 and "SUCCESS" in done.stdout + done.stderr, done.stderr


def test_the_public_checker_rejects_a_log_without_an_end(train_digits):
    pytest.importorskip("mlperf_logging", reason="the package mlperf-logging is not installed")
    path = train_digits(mlperf_logging=True, batch_size=100).run_dir / mlperf_name(0)
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:-1]))
    assert checker(path).returncode != 0
