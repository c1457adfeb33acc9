"""A terminal, pipe or disk behind the output that fails: a run continues or saves, and never ends without its state."""

import os
import signal
import subprocess
import sys
import time

import pytest

BASE = ["train", "--dataset", "digits", "--threads", "1", "--log-freq", "1", "--no-curves"]
TRAIN = [*BASE, "--no-report", "--iterations", "30"]
PATIENCE = 120


def start(*words, folder=None, preexec_fn=None, environment=None, **streams):
    target = ["--run-dir", folder] if folder else []
    return subprocess.Popen(
        [sys.executable, "-m", "convolve", *words, *target],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        preexec_fn=preexec_fn,
        **streams,
    )


def end(process):
    try:
        return process.wait(PATIENCE)
    finally:
        process.kill()


def assert_complete(folder):
    assert list((folder / "checkpoints").glob("step-*"))
    assert '"kind": "end"' in (folder / "events.jsonl").read_text()


def wait_for_step(folder):
    end_time = time.monotonic() + PATIENCE
    while time.monotonic() < end_time:
        table = folder / "training.csv"
        if table.exists() and len(table.read_text().splitlines()) > 2:
            return
        time.sleep(0.02)
    raise AssertionError("no step was logged")


def errors_of(process):
    """Wait for the end and return what was printed to standard error; nothing of it may be a traceback."""
    _, errors = process.communicate(timeout=PATIENCE)
    assert b"Traceback" not in errors and b"Exception ignored" not in errors, errors.decode()
    return errors.decode()


def test_a_run_whose_reader_leaves_continues_to_the_end(tmp_path):
    process = start(*TRAIN, folder=tmp_path / "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    errors = errors_of(process)
    assert process.returncode == 0, errors
    assert_complete(tmp_path / "run")


def test_a_run_on_a_full_disk_of_output_continues_to_the_end(tmp_path):
    with open("/dev/full", "w") as full:
        process = start(*TRAIN, folder=tmp_path / "run", stdout=full, stderr=subprocess.PIPE)
        errors = errors_of(process)
    assert process.returncode == 0, errors
    assert_complete(tmp_path / "run")


@pytest.mark.parametrize("closed", [pytest.param((1,), marks=pytest.mark.slow), (0, 1, 2)])
def test_a_run_with_closed_streams_continues_to_the_end(closed, tmp_path):
    def close():
        for number in closed:
            os.close(number)

    process = start(*TRAIN, folder=tmp_path / "run", preexec_fn=close)
    assert end(process) == 0
    assert_complete(tmp_path / "run")


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_a_run_in_a_folder_of_any_name_prints_in_any_encoding(encoding, tmp_path):
    folder = tmp_path / os.fsdecode("数字 ".encode() + b"\xff")
    process = start(
        *BASE,
        "--iterations",
        "3",
        folder=folder,
        environment={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert rb"\udcff" in out
    assert_complete(folder)


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_run_that_loses_its_terminal_saves_and_stops(number, tmp_path):
    folder = tmp_path / "run"
    words = [*BASE, "--no-report", "--epochs", "500", "--ckpts-per-epoch", "0", "--validation-mode", "none"]
    process = start(*words, folder=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.close()
    wait_for_step(folder)
    process.send_signal(number)
    if number == signal.SIGHUP:
        process.send_signal(number)
    assert end(process) == 128 + number
    assert_complete(folder)


def test_nohup_is_respected(tmp_path):
    folder = tmp_path / "run"

    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = start(*TRAIN, folder=folder, preexec_fn=ignore, stdout=subprocess.DEVNULL)
    wait_for_step(folder)
    process.send_signal(signal.SIGHUP)
    assert end(process) == 0


def test_a_terminal_that_vanishes_does_not_end_the_run(tmp_path):
    ours, theirs = os.openpty()
    process = start(*TRAIN, folder=tmp_path / "run", stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.read(ours, 20)
    os.close(ours)
    assert end(process) == 0
    assert_complete(tmp_path / "run")


@pytest.mark.parametrize("words", [["configs"], ["--help"], ["configs", "--json"]])
def test_a_full_output_of_a_command_is_one_line(words):
    with open("/dev/full", "w") as full:
        errors = errors_of(start(*words, stdout=full, stderr=subprocess.PIPE))
    assert len(errors.splitlines()) == 1 and "No space left" in errors
