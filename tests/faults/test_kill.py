"""SIGKILL at any moment: what is left ends by itself; the restored run has the bits of an unbroken one."""

import csv
import os
import random
import signal
import time
from collections import Counter
from itertools import count

import pytest

import forked_commands
from convolve.runs import session
from convolve.runs.changes import Changes
from digit_runs import digits_config, state_hash, weights_hash
from process_runs import Job, restore_run

LAYOUTS = {
    "one process": {},
    "2 replicas": {"replicas": 2},
    "2 stages": {"shards": 2, "pipeline_splits": ["conv2"], "gradient_accumulation_count": 2},
    "3 uneven replicas": {"replicas": 3, "gradient_accumulation_count": 2, "micro_batches": 5},
    "4 replicas": {"replicas": 4},
    "2 x 2": {"replicas": 2, "shards": 2, "pipeline_splits": ["conv2"], "gradient_accumulation_count": 2},
    "sharded state": {"replicas": 2, "rts": True, "optimizer": "adam"},
    "batch-norm span": {"replicas": 2, "bn_span": 2},
}
NOTICED_WITHIN = 20


def make_config(folder, layout):
    """Save frequent checkpoints: a kill then often hits a save."""
    given = {"model": "lenet-bn", "epochs": 2, "ckpts_per_epoch": 6, "keep_checkpoints": 3, "batch_size": 32}
    return digits_config(folder, **given, **LAYOUTS[layout], validation_mode="none", report=False)


def log_size(folder):
    log = folder / "log.txt"
    return log.stat().st_size if log.exists() else 0


def logged_steps(folder):
    with (folder / "training.csv").open() as table:
        return [row["step"] for row in csv.DictReader(table)]


def is_saving(folder, pid):
    """Return whether a process is replacing a checkpoint, or was when it was killed: it leaves a private name."""
    return any(path.name.endswith(f"-{pid}") for path in (folder / "checkpoints").glob(".*"))


def wait_for_save(folder, process):
    while process.is_alive() and not is_saving(folder, process.pid):
        time.sleep(0.0005)


def train_through_kills(folder, layout, most, moments):
    """A run to its end, though its processes are killed on the way.

    Returns where it ended, and for each killed process the exit code and whether it was saving. A moment of None is
    that of a save.
    """
    kills, place = [], folder
    while True:
        stored = list((place / "checkpoints").glob("step-*"))
        if not stored:
            place = folder / str(len(kills))
        config, before = make_config(place, layout), log_size(place)
        job = Job(config.parallel, *((restore_run, place, Changes()) if stored else (session.train, config)))
        if len(kills) == most:
            job.finish()
            return place, kills
        victim, moment = random.choice(job.processes), next(moments)
        if moment is None:
            wait_for_save(place, victim)
        else:
            time.sleep(moment)
        victim.kill()
        # Who waits for a process that never came is ended by the launcher; all others notice by themselves.
        assert job.wait(NOTICED_WITHIN) or log_size(place) == before, "the other process did not notice"
        if all(process.exitcode == 0 for process in job.processes):
            return place, kills
        kills.append((victim.exitcode, is_saving(place, victim.pid)))


def train_unbroken(folder, layout):
    """Return the second of two undisturbed runs, with warm caches, and its seconds."""
    for number in range(2):
        start, config = time.monotonic(), make_config(folder / str(number), layout)
        Job(config.parallel, session.train, config).finish()
    return folder / "1", time.monotonic() - start


def survive_kills(tmp_path, layout, wanted, counted, saves=0):
    """Kill this many processes outside of a save, and this many during one."""
    unbroken, seconds = train_unbroken(tmp_path / "unbroken", layout)
    done, rounds = Counter(), 0
    # Many random moments are those of a save; more are chosen only if these are too few.
    moments = (None if done[True] * wanted < done[False] * saves else random.uniform(0, seconds) for _ in count())
    while (missing := max(0, wanted - done[False]) + max(0, saves - done[True])) > 0:
        rounds += 1
        folder, kills = train_through_kills(tmp_path / f"broken-{rounds}", layout, missing, moments)
        assert state_hash(folder) == state_hash(unbroken)
        assert logged_steps(folder) == logged_steps(unbroken)
        for code, saving in kills:
            kind = "SIGKILL during a save" if saving else f"SIGKILL, {layout}"
            with counted.one(kind):
                assert code == -signal.SIGKILL
            done[saving] += 1


def test_a_few_kills_leave_the_same_weights(tmp_path, counted):
    survive_kills(tmp_path, "one process", 8, counted, saves=1)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", ["2 replicas", "2 stages"])
def test_two_kills_of_a_rank_leave_the_same_weights(tmp_path, layout, counted):
    survive_kills(tmp_path, layout, 2, counted)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_hundred_kills_a_quarter_during_a_save_leave_the_same_weights(tmp_path, counted):
    survive_kills(tmp_path, "one process", 150, counted, saves=50)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("layout", ["2 replicas", "2 stages"])
def test_fifty_kills_of_a_rank_leave_the_same_weights(tmp_path, layout, counted):
    survive_kills(tmp_path, layout, 50, counted)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("layout", list(LAYOUTS)[3:])
def test_twenty_kills_of_a_rank_leave_the_same_weights(tmp_path, layout, counted):
    survive_kills(tmp_path, layout, 20, counted)


# The command itself

OPTIONS = ["--config", "lenet-digits", "--epochs", "3", "--ckpts-per-epoch", "4", "--keep-checkpoints", "3"]
OPTIONS += ["--logs-per-epoch", "4", "--threads", "1", "--validation-mode", "none", "--no-curves"]


def run_to_the_end(*arguments):
    done = forked_commands.run(arguments, ".", os.environ)
    assert done.returncode == 0, done.stderr


def kill_after(command, seconds):
    """Wait for training to start, sleep, send SIGKILL and return the exit code."""
    with command.stdout:
        for line in command.stdout:
            if "run folder" in line:
                break
        time.sleep(seconds)
        command.process.kill()
        return command.wait()


def command_through_kills(folder, most):
    """A training by the command to its end, and the exit codes of those that were killed on the way."""
    codes, place = [], folder
    while True:
        stored = list((place / "checkpoints").glob("step-*"))
        if not stored:
            place = folder / str(len(codes))
        words = ("restore", place) if stored else ("train", *OPTIONS, "--run-dir", place)
        if len(codes) == most:
            run_to_the_end(*words)
            return place, codes
        code = kill_after(forked_commands.Running(*words), random.uniform(0, 1.2))
        if code == 0:
            return place, codes
        codes.append(code)


def test_kills_of_the_command_leave_the_same_weights(tmp_path, counted):
    run_to_the_end("train", *OPTIONS, "--run-dir", tmp_path / "unbroken")
    kills = rounds = 0
    while kills < 3:
        rounds += 1
        folder, codes = command_through_kills(tmp_path / f"broken-{rounds}", 3 - kills)
        assert weights_hash(folder) == weights_hash(tmp_path / "unbroken")
        for code in counted.each("SIGKILL of the command", codes):
            assert code == -signal.SIGKILL
        kills += len(codes)
