"""Slurm: an sbatch script, in which `srun` replaces the launcher, and the first host of a node list."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from convolve.distributed.launch.ssh import Job
from convolve.errors import ParallelError
from convolve.run_files import CHECKPOINT_GLOB, CHECKPOINTS_FOLDER


def write_batch_script(job: Job, argv: Sequence[str], run_folder: Path, max_restarts: int) -> str:
    """Return an sbatch script with one task per process; after a failure it restores the newest checkpoint."""
    settings = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    command = ["srun", "--kill-on-bad-exit=1", job.python, "-m", "convolve"]
    folder = shlex.quote(str(run_folder))
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name={run_folder.name}",
            f"#SBATCH --nodes={len(job.hosts)}",
            f"#SBATCH --ntasks={job.world}",
            f"#SBATCH --ntasks-per-node={job.world // len(job.hosts)}",
            "#SBATCH --signal=TERM@120",
            f"cd {shlex.quote(str(job.folder))}",
            'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
            f"export MASTER_PORT={job.port}",
            *settings,
            f"for attempt in $(seq 0 {max_restarts}); do",
            f"  if compgen -G {folder}'/{CHECKPOINTS_FOLDER}/{CHECKPOINT_GLOB}' > /dev/null; then",
            f"    {shlex.join([*command, 'restore', str(run_folder)])} && exit 0",
            "  else",
            f'    if [ "$attempt" -gt 0 ] && [ -e {folder} ]; then mv {folder} {folder}-attempt-"$attempt"; fi',
            f"    {shlex.join([*command, *argv])} && exit 0",
            "  fi",
            "done",
            "exit 1",
            "",
        ]
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list such as gpu-[03-07,12],other."""
    match = re.match(r"([^,\[]+)(?:\[([^],-]+))?", nodes)
    if match is None:
        raise ParallelError(f"SLURM_JOB_NODELIST={nodes}: contains no host; set MASTER_ADDR")
    return match[1] + (match[2] or "")
