"""Slurm: the generated script under real daemons on two virtual hosts; what ends a job, and what it then has."""

import json
import os
import signal
import subprocess
import sys

import pytest

import slurm_cluster
from convolve.cli.main import dispatch
from digit_runs import weights_hash
from held_runs import HeldRun

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)]

TRAIN = ["train", "--config", "lenet-digits", "--epochs", "3", "--batch-size", "16", "--threads", "1", "--no-curves"]
TRAIN += ["--no-report", "--ckpts-per-epoch", "6", "--learning-rate", "0.01", "--optimizer", "momentum"]


@pytest.fixture
def slurm(hosts, tmp_path):
    yield from slurm_cluster.open_slurm(hosts, tmp_path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    words = [*TRAIN, "--gradient-accumulation-count", "2", "--run-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "convolve", *words], check=True, capture_output=True)
    return weights_hash(folder)


@pytest.fixture
def held(tmp_path):
    return HeldRun(tmp_path)


@pytest.fixture
def script(slurm, held, capsys, monkeypatch):
    """Return the batch script of a held run on both hosts."""
    monkeypatch.chdir(slurm.folder)

    def write(*requests):
        variables = [word for name, value in held.variables.items() for word in ("--env", f"{name}={value}")]
        options = [word for request in requests for word in ("--sbatch", request)]
        launch = ["launch", "--dry-run", "--json", "--hosts", ",".join(slurm.hosts.names), "--num-replicas", "2"]
        launch += ["--max-restarts", "2", "--timeout", "600", *variables, *options]
        assert dispatch([*launch, "--", *TRAIN, *held.words, "--run-dir", str(slurm.folder / "run")]) == 0
        return json.loads(capsys.readouterr().out)["batch_script"]

    return write


def log(slurm):
    return (slurm.folder / "job.log").read_text()


def find_rank(slurm, rank):
    for host in slurm.hosts.names:
        for pid in subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split():
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            if f"SLURM_PROCID={rank}".encode() in variables and b"convolve" in words:
                return int(pid)
    raise AssertionError(f"rank {rank} is not there")


def test_a_killed_rank_is_repeated_and_a_requeued_job_continues(slurm, held, script, alone):
    job = slurm.submit(script())
    slurm.wait_until(held.reached)
    os.kill(find_rank(slurm, 1), signal.SIGKILL)
    held.release()
    slurm.wait_until(lambda: "task 0: Exited with exit code 1" in log(slurm))
    held.hold.touch()
    slurm.wait_until(lambda: log(slurm).count("restored step-") == 1)
    slurm.run("scontrol", "requeue", job)
    slurm.wait_until(lambda: slurm.show(job)["Restarts"] == "1")
    held.release()
    ended = slurm.wait_for_end(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log(slurm)
    assert weights_hash(slurm.folder / "run") == alone


def test_the_time_limit_saves_and_the_next_element_of_an_array_continues(slurm, held, script, alone):
    job = slurm.submit(script("time=2", "signal=TERM@60", "array=1-2%1"))
    slurm.wait_until(held.reached)
    slurm.wait_until(lambda: "CANCELLED AT" in log(slurm))
    held.release()
    slurm.wait_for_end(job)
    assert log(slurm).count("Interrupted by SIGTERM") == 1 and log(slurm).count("Training ") == 1
    assert (slurm.show(f"{job}_1")["ExitCode"], slurm.show(f"{job}_2")["ExitCode"]) == ("143:0", "0:0")
    assert weights_hash(slurm.folder / "run") == alone


def test_a_cancelled_job_has_saved_its_last_step(slurm, held, script):
    job = slurm.submit(script())
    slurm.wait_until(held.reached)
    slurm.run("scancel", "--signal=TERM", job)
    held.release()
    ended = slurm.wait_for_end(job)
    assert ended["ExitCode"] == "143:0" and ended["Restarts"] == "0"
    assert log(slurm).count("Training ") == 1, "TERM is not followed by another attempt"
    newest = max((slurm.folder / "run/checkpoints").glob("step-*"))
    assert f"Interrupted by SIGTERM at step {int(newest.name[5:])};" in log(slurm)


def test_a_user_error_is_not_repeated(slurm, script):
    text = script().replace("--epochs 3", "--epochs -3")
    ended = slurm.wait_for_end(slurm.submit(text))
    assert ended["ExitCode"] == "2:0"
    assert log(slurm).count("--epochs -3: must be") == 1
