"""Replicas share the work and change nothing: the same weights and statistics as one process that accumulates."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from digit_runs import weights_hash
from safetensors.torch import load_file

pytestmark = pytest.mark.dist

SMALL = ["--config", "lenet-digits", "--iterations", "20", "--optimiser", "momentum", "--learning-rate", "0.01"]
SMALL += ["--warmup-epochs", "0", "--threads", "1", "--no-curves"]


def weights(folder):
    newest = max((folder / "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


@pytest.mark.parametrize("model", ["lenet-bn", "cnn-wide"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_equal_one_process_bit_for_bit(command, tmp_path, replicas, model):
    """One micro batch each, so that sums have the same order; batch-norm statistics and dropout masks included."""
    given = [*SMALL, "--model", model, "--batch-size", 16]
    alone = command("train", *given, "--gradient-accumulation-count", replicas, "--run-dir", tmp_path / "alone")
    together = command("train", *given, "--replicas", replicas, "--run-dir", tmp_path / "together", "--json")
    assert alone.returncode == 0, alone.stderr
    assert together.returncode == 0, together.stderr
    one, many = weights(tmp_path / "alone"), weights(tmp_path / "together")
    assert all(one[name].equal(many[name]) for name in one)
    assert together.json["test_samples"] == 297


def test_replicas_with_accumulation_agree_to_rounding(command, tmp_path):
    """2 x 2 x 16 against 1 x 4 x 16 adds the same numbers in another order; a network without batch norm."""
    given = [*SMALL, "--batch-size", 16, "--model", "lenet5"]
    command("train", *given, "--gradient-accumulation-count", 4, "--run-dir", tmp_path / "alone")
    command("train", *given, "--gradient-accumulation-count", 2, "--replicas", 2, "--run-dir", tmp_path / "together")
    one, many = weights(tmp_path / "alone"), weights(tmp_path / "together")
    assert max(float((one[name] - many[name]).abs().max()) for name in one) <= 1e-6


def test_the_same_command_joins_under_torchrun(command, tmp_path):
    given = [*SMALL, "--batch-size", "16", "--replicas", "2", "--json"]
    own = command("train", *given, "--run-dir", tmp_path / "own")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "convolve"]
    done = subprocess.run(
        [*words, "train", *given, "--run-dir", str(tmp_path / "torchrun")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-800:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["test_accuracy"] == own.json["test_accuracy"]
    assert weights_hash(tmp_path / "torchrun") == weights_hash(tmp_path / "own")


def test_a_wrong_number_of_processes_is_named(command):
    done = command("train", *SMALL, "--replicas", 2, env={"RANK": "0", "WORLD_SIZE": "3"})
    assert done.returncode == 1
    assert "3 processes were started, but replicas=2 x shards=1 need 2" in done.stderr


def test_a_mistake_is_one_line_and_its_exit_code_with_replicas_too(command, tmp_path):
    done = command("train", *SMALL, "--replicas", 2, "--hold-out", 1500, "--run-dir", tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.count("hold-out=1500") == 1


def test_replicas_stopped_by_a_signal_save_once_and_restore_to_the_same_bits(command, tmp_path):
    given = ["--config", "lenet-digits", "--epochs", "4", "--replicas", "2", "--threads", "1", "--no-curves"]
    whole = command("train", *given, "--run-dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    words = [sys.executable, "-m", "convolve", "train", *given, "--run-dir", str(tmp_path / "broken")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    for line in process.stdout:
        if "epoch 1.5" in line:
            break
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0, output
    again = command("restore", tmp_path / "broken")
    assert again.returncode == 0, again.stderr
    assert weights_hash(tmp_path / "broken") == weights_hash(tmp_path / "whole")


def test_a_killed_replica_ends_the_job_and_the_restored_run_has_the_same_bits(command, tmp_path):
    given = ["--config", "lenet-digits", "--epochs", "4", "--replicas", "2", "--threads", "1", "--no-curves"]
    command("train", *given, "--run-dir", tmp_path / "whole")
    words = [sys.executable, "-m", "convolve", "train", *given, "--run-dir", str(tmp_path / "broken")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    for line in process.stdout:
        if "epoch 1.5" in line:
            break
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    began = time.perf_counter()
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.perf_counter() - began < 30
    again = command("restore", tmp_path / "broken")
    assert again.returncode == 0, again.stderr
    assert weights_hash(tmp_path / "broken") == weights_hash(tmp_path / "whole")
