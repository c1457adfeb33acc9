"""Slurm: the first host of a node list, and batch scripts, which are run with fake programs."""

import os
import subprocess

import pytest

from convolve.distributed.launch.slurm import first_host, write_batch_script
from convolve.distributed.launch.ssh import Job
from convolve.errors import ParallelError


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node1,node2", "node1"),
        ("node[01-04]", "node01"),
        ("gpu-node-[003,007-9],other", "gpu-node-003"),
        ("my-host,other-[1-2]", "my-host"),
    ],
)
def test_the_first_host_of_a_list_is_found(nodes, first):
    assert first_host(nodes) == first


def test_a_list_without_a_host_is_named():
    with pytest.raises(ParallelError, match="contains no host"):
        first_host("")


def script(tmp_path, max_restarts=0, **options):
    values = {"hosts": ("a", "b"), "instances": 2, "world": 8, "master": "a", "port": 29500, "python": "python3"}
    job = Job(**{**values, "folder": tmp_path, **options})
    return write_batch_script(job, ["train", "--name-suffix", "it's"], tmp_path / "my run", max_restarts)


def test_a_batch_script_requests_one_task_for_each_process(tmp_path):
    lines = script(tmp_path).splitlines()
    assert lines[0] == "#!/bin/bash"
    requests = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert requests == ["job-name=my run", "nodes=2", "ntasks=8", "ntasks-per-node=4", "signal=TERM@120"]
    assert "export MASTER_PORT=29500" in lines


def test_a_batch_script_quotes_folders_arguments_and_environment(tmp_path):
    text = script(tmp_path, environment={"GREETING": "it's $HOME"})
    assert "export GREETING='it'\"'\"'s $HOME'" in text.splitlines()
    assert f"    srun --kill-on-bad-exit=1 python3 -m convolve restore '{tmp_path}/my run' && exit 0" in text
    assert "-m convolve train --name-suffix 'it'\"'\"'s' && exit 0" in text


@pytest.fixture
def run_script(tmp_path):
    """Run a batch script with an srun that records its arguments and fails, so every attempt is made."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in (("srun", 'echo "$@" >> calls.txt; mkdir -p "my run"; exit 1'), ("scontrol", "echo first-host")):
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)

    def run(text):
        environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, check=False)
        return done.returncode, [line.split()[4] for line in (tmp_path / "calls.txt").read_text().splitlines()]

    return run


def test_a_batch_script_starts_again_without_a_checkpoint_and_keeps_every_folder(tmp_path, run_script):
    assert run_script(script(tmp_path, max_restarts=2)) == (1, ["train"] * 3)
    assert {path.name for path in tmp_path.glob("my run*")} == {"my run", "my run-attempt-1", "my run-attempt-2"}


def test_a_batch_script_restores_as_soon_as_a_checkpoint_exists(tmp_path, run_script):
    (tmp_path / "my run" / "checkpoints" / "step-000000005").mkdir(parents=True)
    assert run_script(script(tmp_path, max_restarts=1)) == (1, ["restore"] * 2)
