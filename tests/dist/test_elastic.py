"""A run that continues with another number of workers keeps its global batch, its samples and its bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from convolve.config import ParallelConfig
from convolve.errors import ConfigError
from convolve.loggers.base import SilentConsole
from convolve.runs import session
from convolve.runs.changes import Changes, fit_processes
from digit_runs import digits_config, state_hash, weights_hash
from held_runs import HeldRun
from process_runs import Job, restore_together, train_together

pytestmark = pytest.mark.dist

STEP = {"model": "lenet-bn", "optimizer": "momentum", "learning_rate": 0.01, "ema_decay": 0.9, "report": False}
FOUR = {**STEP, "epochs": None, "batch_size": 16, "gradient_accumulation_count": 4, "validation_mode": "none"}


def test_a_run_continues_on_three_replicas_that_run_two_one_and_one_micro_batches(tmp_path):
    train_together(digits_config(tmp_path / "alone", **FOUR, iterations=8))
    moved = train_together(digits_config(tmp_path / "moved", **FOUR, iterations=4)).run_dir
    restore_together(moved, Changes(iterations=8, parallel={"replicas": 3}))
    assert state_hash(moved) == state_hash(tmp_path / "alone")
    assert session.read_config(moved).micro_batches == 4


def test_processes_that_were_started_are_replicas_of_the_same_global_batch(tmp_path, monkeypatch):
    config = digits_config(tmp_path, **FOUR, replicas=2, resume=True)
    monkeypatch.setenv("RANK", "0")
    for world, accumulation in ((1, 8), (2, 4), (3, 3), (8, 1)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        fitted = fit_processes(config)
        assert (fitted.parallel.replicas, fitted.optim.gradient_accumulation_count) == (world, accumulation)
        assert fitted.global_batch_size == config.global_batch_size == 128
    monkeypatch.setenv("WORLD_SIZE", "9")
    with pytest.raises(ConfigError, match="replicas=9: a step of this run has 8 micro batches"):
        fit_processes(config)


def test_the_same_command_starts_and_continues_a_run(tmp_path):
    given = {**FOUR, "resume": True}
    train_together(digits_config(tmp_path / "alone", **FOUR, iterations=6))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".claimed").touch()  # of a process that was killed before it wrote anything
    first = session.train(digits_config(folder, **given, iterations=6), SilentConsole())
    assert weights_hash(folder) == weights_hash(tmp_path / "alone")
    again = session.train(digits_config(folder, **given, iterations=6), SilentConsole())
    assert (again.steps, weights_hash(folder)) == (first.steps, weights_hash(tmp_path / "alone"))


def test_another_option_of_a_command_that_continues_a_run_is_rejected(tmp_path):
    given = {**FOUR, "resume": True, "iterations": 2}
    train_together(digits_config(tmp_path / "run", **given))
    with pytest.raises(ConfigError, match="--learning-rate 0.5: the run in .* has 0.01; use its options"):
        session.train(digits_config(tmp_path / "run", **{**given, "learning_rate": 0.5}), SilentConsole())


def wait_for_checkpoint(folder, job, beyond):
    """Wait until a run has a checkpoint of a later step, or has ended."""
    while any(process.is_alive() for process in job.processes):
        newest = max((folder / "checkpoints").glob("step-*"), default=None)
        if newest is not None and newest.name > beyond:
            return newest.name
        time.sleep(0.01)
    return None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["lenet-bn", "cnn-wide"])
def test_twenty_kills_with_other_numbers_of_workers_keep_the_bits(tmp_path, model):
    given = {**STEP, "model": model, "epochs": 12, "batch_size": 16, "gradient_accumulation_count": 2, "replicas": 4}
    given |= {"ckpts_per_epoch": 12, "keep_checkpoints": 3, "validation_mode": "none"}
    alone = {**given, "gradient_accumulation_count": 8, "replicas": 1}
    train_together(digits_config(tmp_path / "alone", **alone))
    config = digits_config(tmp_path / "run", **given, resume=True)
    choose, newest, kills = random.Random(model), "", 0
    while True:
        workers = (3, 1, 4, 2)[kills % 4]
        job = Job(ParallelConfig(replicas=workers), session.train, config)
        found = wait_for_checkpoint(tmp_path / "run", job, newest) if kills < 20 else None
        if found is None:
            job.finish()
            break
        newest, kills = found, kills + 1
        for process in choose.sample(job.processes, workers):  # the launcher ends the others of a killed one
            process.kill()
            process.join()
    assert kills == 20
    assert state_hash(tmp_path / "run") == state_hash(tmp_path / "alone")


TORCHRUN = ["-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=job"]
TORCHRUN += ["--rdzv-backend=c10d", "--rdzv-endpoint=10.213.7.1:29400"]
TRAIN = ["train", "--config", "lenet-digits", "--epochs", "6", "--batch-size", "16", "--threads", "1", "--no-curves"]
TRAIN += ["--no-report", "--ckpts-per-epoch", "6", "--learning-rate", "0.01", "--optimizer", "momentum"]


class Agents:
    """torchrun on virtual hosts, one worker each."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder, self.started = hosts, folder, []
        self.held = HeldRun(folder)

    def start(self, host, *, first=False):
        conf = f"--rdzv-conf=is_host={int(first)},last_call_timeout=20"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment |= self.held.variables
        address = f"--local-addr=10.213.7.{host + 1}"
        words = ["ip", "netns", "exec", self.hosts.names[host], sys.executable, *TORCHRUN, conf, address, "-m"]
        words += ["convolve", *TRAIN, "--gradient-accumulation-count", "2", "--replicas", "4", "--resume"]
        words += self.held.words
        with self.log(len(self.started)).open("w") as log:
            options = {"cwd": self.folder, "env": environment, "stdout": log, "stderr": log}
            self.started.append(subprocess.Popen([*words, "--run-dir", str(self.folder / "run")], **options))

    def log(self, number):
        return self.folder / f"agent-{number}.log"

    def worker(self, number):
        found = subprocess.run(["pgrep", "-P", str(self.started[number].pid)], capture_output=True, text=True)
        return int(found.stdout.split()[0])

    def starts(self):
        """The number of replicas of each start of the run."""
        events = self.folder / "run/events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        found = [json.loads(line) for line in lines if '"kind": "start"' in line]
        return [event["config"]["replicas"] for event in found]

    def wait_until(self, done):
        while not done():
            assert all(agent.poll() is None for agent in self.started), self.log(0).read_text()[-2000:]
            time.sleep(0.05)

    def wait_for_replicas(self, count):
        """Wait until the run has so many replicas and is held."""
        self.wait_until(lambda: self.starts()[-1:] == [count] and self.held.reached())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_torchrun_replaces_a_killed_worker_and_accepts_another_one(hosts, tmp_path):
    agents = Agents(hosts, tmp_path)
    for host in (0, 0, 1):
        agents.start(host, first=not agents.started)
    agents.wait_for_replicas(3)
    before = agents.starts()
    os.kill(agents.worker(1), signal.SIGKILL)
    agents.wait_until(lambda: len(agents.starts()) > len(before))
    agents.start(1)
    agents.wait_for_replicas(4)
    agents.held.release()
    assert [agent.wait() for agent in agents.started] == [0, 0, 0, 0]
    words = [*TRAIN, "--gradient-accumulation-count", "8", "--run-dir", str(tmp_path / "alone")]
    subprocess.run([sys.executable, "-m", "convolve", *words], check=True, capture_output=True)
    assert weights_hash(tmp_path / "run") == weights_hash(tmp_path / "alone")
    assert agents.starts()[-1] == 4 and len(agents.starts()) >= len(before) + 2, "after the kill, with four workers"
