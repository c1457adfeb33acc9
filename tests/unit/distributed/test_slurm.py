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


def script(tmp_path, max_restarts=0, requests=(), **options):
    values = {"hosts": ("a", "b"), "instances": 2, "world": 8, "master": "a", "port": 29500, "python": "python3"}
    job = Job(**{**values, "folder": tmp_path, **options})
    argv = ["train", "--name-suffix", "it's", "--resume"]
    return write_batch_script(job, argv, tmp_path / "my run", max_restarts, requests)


def test_a_batch_script_requests_one_task_for_each_process(tmp_path):
    lines = script(tmp_path, requests=["time=4:00:00", "gpus-per-task=1"]).splitlines()
    assert lines[0] == "#!/bin/bash"
    requests = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert requests[:5] == ["job-name=my run", "nodes=2", "ntasks=8", "ntasks-per-node=4", "signal=TERM@120"]
    assert requests[5:] == ["requeue", "open-mode=append", "time=4:00:00", "gpus-per-task=1"]


def test_a_batch_script_quotes_folders_arguments_and_environment(tmp_path):
    text = script(tmp_path, environment={"GREETING": "it's $HOME"})
    assert "export GREETING='it'\"'\"'s $HOME'" in text.splitlines()
    assert " --wait=120 python3 -m convolve train --name-suffix 'it'\"'\"'s' --resume" in text


@pytest.fixture
def run_script(tmp_path):
    """Run a batch script with an srun that records the port and fails with a code."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(text, code, job=77):
        for name, body in (("srun", f"echo $MASTER_PORT >> calls.txt; exit {code}"), ("scontrol", "echo first-host")):
            (programs / name).write_text(f"#!/bin/sh\n{body}\n")
            (programs / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": str(job)}
        done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, check=False)
        return done.returncode, (tmp_path / "calls.txt").read_text().split()

    return run


@pytest.mark.parametrize(("code", "attempts"), [(1, 3), (137, 3), (0, 1), (2, 1), (143, 1)])
def test_a_batch_script_repeats_failures_but_neither_user_errors_nor_stops(tmp_path, run_script, code, attempts):
    assert run_script(script(tmp_path, max_restarts=2), code) == (code, ["20077"] * attempts)
