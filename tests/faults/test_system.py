"""A system that misbehaves: any file call of a save fails or is the last one, and the date jumps by years."""

import csv
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from convolve.kernels.build import COMPILERS
from digit_runs import weights_hash

HERE = Path(__file__).parent
TRAINING = ["--config", "lenet-digits", "--threads", "1", "--no-curves", "--no-report", "--keep-checkpoints", "2"]
TRAINING += ["--ckpts-per-epoch", "3", "--logs-per-epoch", "20", "--lr-schedule", "constant", "--warmup-epochs", "0"]


@pytest.fixture(scope="module")
def faulty_system(tmp_path_factory):
    """The library of `faulty_system.c`, compiled."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler on Linux")
    library = tmp_path_factory.mktemp("system") / "faulty_system.so"
    words = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", HERE / "faulty_system.c", "-o", library, "-ldl"]
    subprocess.run(words, check=True)
    return library


KILLED = 0


@pytest.fixture(scope="module")
def faulty_saves(faulty_system, tmp_path_factory):
    """The results of `system_faults.py` for each kind of fault; one process for all, since torch is imported in it."""
    codes = (KILLED, errno.EIO, errno.ENOSPC)
    words = [sys.executable, HERE / "system_faults.py", faulty_system, tmp_path_factory.mktemp("saves"), *codes]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "LD_PRELOAD": str(faulty_system), "PYTHONPATH": path}
    done = subprocess.run([*map(str, words)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {code: [result for result in results if result["code"] == code] for code in codes}


def test_after_a_kill_at_any_system_call_of_a_save_the_newest_good_checkpoint_loads(faulty_saves, counted):
    for result in counted.each("SIGKILL at a system call of a save", faulty_saves[KILLED]):
        assert result["exit"] == -signal.SIGKILL
        assert result["left"] in (2.0, 3.0)
        assert result["after"] == 4.0


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["I/O error", "full disk"])
def test_a_system_call_of_a_save_that_fails_is_one_line_or_harmless(code, faulty_saves, counted):
    kind = "I/O error" if code == errno.EIO else "full disk"
    for result in counted.each(f"{kind} at a system call of a save", faulty_saves[code]):
        assert result["exit"] == 0 and "\n" not in result["message"]
        assert result["left"] == 3.0 if not result["message"] else result["left"] in (2.0, 3.0)
        assert result["after"] == 4.0
    results = faulty_saves[code]
    assert sum(os.strerror(code) in result["message"] for result in results) > len(results) // 2


def read_column(folder, name):
    with (folder / "training.csv").open() as table:
        return [float(row[name]) for row in csv.DictReader(table)]


def find_jumps(folder):
    """Where the date went back, or on by more than a day, from one event of a run to the next."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    times = [datetime.fromisoformat(json.loads(line)["time"]) for line in lines]
    steps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return [step for step in steps if not timedelta(0) <= step < timedelta(days=1)]


@pytest.mark.parametrize("layout", [[], pytest.param(["--replicas", "2"], marks=pytest.mark.slow)], ids=["1", "2"])
def test_a_date_that_jumps_by_years_changes_nothing_but_the_dates_in_the_log(
    layout, faulty_system, tmp_path, command, quick_command, counted
):
    jumping = {"LD_PRELOAD": str(faulty_system), "CLOCK_JUMPS": "1"}
    calm, run = tmp_path / "calm", tmp_path / "run"
    assert quick_command("train", *TRAINING, *layout, "--epochs", 2, "--run-dir", calm).returncode == 0
    begun = command("train", *TRAINING, *layout, "--epochs", 1, "--run-dir", run, env=jumping)
    assert begun.returncode == 0, begun.stderr
    done = command("restore", run, "--epochs", 2, env=jumping)
    assert done.returncode == 0, done.stderr
    for step in counted.each("clock jump during a run", find_jumps(run)):
        assert step
    assert weights_hash(run) == weights_hash(calm)
    kept = [sorted(path.name for path in (folder / "checkpoints").glob("step-*")) for folder in (run, calm)]
    assert kept[0][-2:] == kept[1][-2:] and len(kept[0]) <= 3, "the newest two, and the best"
    assert read_column(run, "step") == read_column(calm, "step")
    seconds = read_column(run, "total_seconds")
    assert seconds == sorted(seconds) and 0 < seconds[-1] < 600
    assert all(speed > 0 for speed in read_column(run, "images_per_second"))
