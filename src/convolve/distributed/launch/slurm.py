"""Slurm: an sbatch script, in which `srun` replaces the launcher, and the first host of a node list."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from convolve.distributed.launch.local import STOPPED, USER_ERROR
from convolve.distributed.launch.ssh import Job
from convolve.errors import ParallelError


def write_batch_script(
    job: Job, argv: Sequence[str], run_folder: Path, max_restarts: int, requests: Sequence[str] = ()
) -> str:
    """Return an sbatch script with one task per process, and more `requests` of resources such as `time=4:00:00`.

    The command continues its run, so a job that was requeued, and a step that is repeated after a failure, lose
    nothing. A user error or a requested stop is not repeated. The port depends on the job. Tasks end by themselves when
    one fails; if Slurm ended them, the signal would look like a requested stop.
    """
    srun = ["srun", "--kill-on-bad-exit=0", f"--wait={round(2 * job.timeout)}"]
    settings = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name={run_folder.name}",
            f"#SBATCH --nodes={len(job.hosts)}",
            f"#SBATCH --ntasks={job.world}",
            f"#SBATCH --ntasks-per-node={job.world // len(job.hosts)}",
            "#SBATCH --signal=TERM@120",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
            *(f"#SBATCH --{request}" for request in requests),
            f"cd {shlex.quote(str(job.folder))}",
            'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
            "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))",
            *settings,
            f"for attempt in $(seq 0 {max_restarts}); do",
            f"  {shlex.join([*srun, job.python, '-m', 'convolve', *argv])}",
            "  code=$?",
            f"  case $code in {'|'.join(map(str, (0, USER_ERROR, *STOPPED)))}) exit $code;; esac",
            "done",
            "exit $code",
            "",
        ]
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list such as gpu-[03-07,12],other."""
    match = re.match(r"([^,\[]+)(?:\[([^],-]+))?", nodes)
    if match is None:
        raise ParallelError(f"SLURM_JOB_NODELIST={nodes}: contains no host; set MASTER_ADDR")
    return match[1] + (match[2] or "")
