"""SIGKILL at any moment: the restored run ends with the same bits as an unbroken one."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from digit_runs import weights_hash

OPTIONS = ["--config", "lenet-digits", "--epochs", "3", "--ckpts-per-epoch", "4", "--keep-checkpoints", "3"]
OPTIONS += ["--logs-per-epoch", "4", "--threads", "1", "--validation-mode", "none", "--no-curves"]


def start(*arguments):
    words = [sys.executable, "-m", "convolve", *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)


def run_to_the_end(*arguments):
    process = start(*arguments)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output


def kill_after(process, seconds):
    """Wait for training itself to begin, then a random while, then SIGKILL; False if it ended before."""
    for line in process.stdout:
        if "run folder" in line:
            break
    time.sleep(seconds)
    ended = process.poll() is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return not ended


def survive_kills(tmp_path, wanted, seed):
    run_to_the_end("train", *OPTIONS, "--run-dir", tmp_path / "unbroken")
    began = time.perf_counter()
    expected = weights_hash(tmp_path / "unbroken")
    draw, kills, rounds = random.Random(seed), 0, 0
    while kills < wanted:
        folder = tmp_path / f"broken-{rounds}"
        rounds += 1
        process = start("train", *OPTIONS, "--run-dir", folder)
        while kill_after(process, draw.uniform(0, 1.2)):
            kills += 1
            stored = list((folder / "checkpoints").glob("step-*")) if (folder / "checkpoints").exists() else []
            if not stored:
                folder = tmp_path / f"again-{kills}"
            verb = ("restore", folder) if stored else ("train", *OPTIONS, "--run-dir", folder)
            if kills == wanted:
                run_to_the_end(*verb)
                break
            process = start(*verb)
        assert weights_hash(folder) == expected
    return kills, time.perf_counter() - began


def test_a_few_kills_leave_the_same_weights(tmp_path):
    kills, _ = survive_kills(tmp_path, wanted=5, seed=1)
    assert kills == 5


@pytest.mark.slow
def test_thirty_kills_leave_the_same_weights(tmp_path):
    kills, seconds = survive_kills(tmp_path, wanted=30, seed=2)
    print(f"{kills} kills survived in {seconds:.0f} s")  # noqa: T201
    assert kills == 30
