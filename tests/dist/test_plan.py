"""What `convolve plan` predicts, against what `convolve train` then takes: within a factor of 2, on quiet cores."""

import os
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

FACTOR = 2.0
JOB = ["--model", "resnet8-cifar", "--dataset", "digits", "--batch-size", 16, "--optimizer", "momentum"]
RUN = ["--iterations", 20, "--validation-mode", "none", "--no-checkpoints", "--no-logs", "--no-curves", "--no-report"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def busy_fraction(seconds=1.0):
    """Return the fraction of the time of all cores that other processes use."""

    def read():
        return [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]

    before = read()
    time.sleep(seconds)
    spent = [after - earlier for earlier, after in zip(before, read(), strict=True)]
    return 1 - (spent[3] + spent[4]) / sum(spent)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_predicted_step_takes_about_as_long_as_a_real_one(command, replicas, tmp_path):
    """Processes have one thread each. Beyond the number of cores they take turns, which the plan knows."""
    if (busy := busy_fraction()) > 0.2:
        pytest.skip(f"others use {busy:.0%} of the cores; a prediction for quiet ones cannot be checked")
    cores = len(os.sched_getaffinity(0))
    layout = ["--replicas", replicas, "--json"]
    planned = command("plan", *JOB, *layout, "--cores", min(cores, replicas), env=ONE_THREAD)
    measured = command("train", *JOB, *RUN, *layout, "--run-dir", tmp_path / "run", env=ONE_THREAD)
    assert planned.returncode == 0 and measured.returncode == 0, planned.stderr + measured.stderr
    ratio = planned.json["speed"]["step_ms"] / measured.json["ms_per_step"]
    assert 1 / FACTOR < ratio < FACTOR, f"predicted / measured = {ratio:.2f}"
