"""What `convolve plan` predicts, against what `convolve train` then takes: within a factor of 1.5, on quiet cores."""

import pytest

from convolve.device import usable_threads

pytestmark = [pytest.mark.dist, pytest.mark.slow]

FACTOR = 1.5
JOB = ["--model", "resnet8-cifar", "--dataset", "digits", "--batch-size", 32, "--optimiser", "momentum"]
RUN = ["--iterations", 24, "--validation-mode", "none", "--no-checkpoints", "--no-logs", "--no-curves", "--no-report"]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_predicted_step_takes_about_as_long_as_a_real_one(command, replicas, tmp_path):
    """Four processes on two cores take turns, which the plan knows; each has one thread."""
    cores = usable_threads()
    if cores < 2:
        pytest.skip("two processes need two cores to be predicted")
    layout = ["--replicas", replicas, "--json"]
    planned = command("plan", *JOB, *layout, "--cores", cores)
    measured = command("train", *JOB, *RUN, *layout, "--run-dir", tmp_path / "run")
    assert planned.returncode == 0 and measured.returncode == 0, planned.stderr + measured.stderr
    ratio = planned.json["speed"]["step_ms"] / measured.json["ms_per_step"]
    assert 1 / FACTOR < ratio < FACTOR, f"predicted / measured = {ratio:.2f}"
