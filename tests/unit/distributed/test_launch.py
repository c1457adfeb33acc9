"""Jobs on paper: where instances go, what they are told, and what happens after a failure."""

import subprocess

import pytest

from convolve.cli.main import dispatch
from convolve.distributed.launch.agent import Orders
from convolve.distributed.launch.local import Instance, next_arguments, run_attempts
from convolve.distributed.launch.ssh import Job
from convolve.errors import ConfigError

TRAIN = ["train", "--config", "lenet-digits", "--json"]


def job(**given):
    return Job(**{"hosts": ("a", "b"), "instances": 4, "world": 8, "master": "a", "port": 29400, **given})


def test_instances_fill_one_host_after_the_other():
    assert [job().host_of(number) for number in range(4)] == ["a", "a", "b", "b"]


def test_orders_survive_the_way_to_an_instance():
    orders = job().orders(3, TRAIN, attempt=2)
    assert Orders.from_line(orders.to_line()) == orders
    assert orders.instance == Instance(3, 4, "a:29402", "convolve-29400-2", 2, 60.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"instances": 3}, "num-instances=3 on 2 hosts: every host has the same number"),
        ({"world": 6}, "num-instances=4 for 6 processes"),
    ],
)
def test_uneven_jobs_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        job(**given)


def test_words_reach_a_program_unharmed_through_a_remote_shell():
    """A stand-in for ssh: joins its words and gives them to a shell, as ssh does."""
    told = job(remote_shell="sh -c", environment={"GREETING": "it's $HOME"}, python="python3")
    script = told.script("-c", "import os, sys; print(os.environ['GREETING'], sys.argv[1])", 'a "b" c')
    done = subprocess.run(told.reach("a", script), capture_output=True, text=True, check=True)
    assert done.stdout == 'it\'s $HOME a "b" c\n'


def test_a_restart_restores_the_newest_checkpoint(tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-000000047").mkdir(parents=True)
    assert next_arguments(TRAIN, tmp_path / "run", 0) == TRAIN
    assert next_arguments(TRAIN, tmp_path / "run", 1) == ["restore", str(tmp_path / "run"), "--json"]


def test_a_restart_without_a_checkpoint_begins_anew_and_deletes_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").write_text("so far")
    assert next_arguments(TRAIN, tmp_path / "run", 1) == TRAIN
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "run-attempt-1" / "log.txt").read_text() == "so far"


@pytest.mark.parametrize(
    ("codes", "expected", "attempts"),
    [([0], 0, 1), ([137, 0], 0, 2), ([1, 1, 1], 1, 3), ([2], 2, 1), ([143], 143, 1), ([137, 130], 130, 2)],
)
def test_failures_are_tried_again_but_neither_mistakes_nor_wishes(codes, expected, attempts, tmp_path):
    left, said = list(codes), []
    assert run_attempts(lambda words, attempt: left.pop(0), TRAIN, tmp_path / "run", 2, said.append) == expected
    assert len(codes) - len(left) == attempts == len(said) + 1


def test_a_dry_run_prints_commands_and_a_batch_script(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--hosts", "a,b", "--num-instances", "4", "--num-replicas", "8", "--max-restarts", "2"]
    assert dispatch([*words, "--dry-run", "--", *TRAIN, "--batch-size", "4"]) == 0
    text = capsys.readouterr().out
    assert text.count("ssh -o BatchMode=yes") == 4
    assert text.count("--nproc-per-node=2") == 4
    assert "#SBATCH --ntasks=8" in text and "seq 0 2" in text
    script = text.partition("# or, for sbatch:\n")[2]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "a"], "write it after `--`"),
        (["--hosts", "a", "--", "serve"], "write it after `--`"),
        (["--hosts", ",", "--", "train"], "name at least one host"),
        (["--env", "X", "--", *TRAIN, "--run-dir", "r"], "--env X: must be NAME=VALUE"),
        (["--hosts", "a,b", "--num-replicas", "3", "--", *TRAIN, "--run-dir", "r"], "num-instances=2 for 3 processes"),
        (["--", "train", "--confg", "x"], "convolve train: unknown option --confg"),
    ],
)
def test_a_mistake_is_found_before_any_host_is_asked(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        dispatch(["launch", *words])
