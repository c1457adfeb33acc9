"""A verb in processes of its own on this host."""

import sys
from collections.abc import Sequence

from convolve.config import Config
from convolve.parallel.launch import run_attempts, start_processes
from convolve.parallel.topology import launched


def wants_job(config: Config) -> bool:
    """Whether this process is to start others for a training, rather than be one of them or the only one."""
    return (config.parallel.processes > 1 or config.parallel.max_restarts > 0) and not launched()


def start_job(arguments: Sequence[str], config: Config) -> int:
    """Run a training's processes here; with --max-restarts again from the newest checkpoint after a failure."""
    world = config.parallel.processes
    if not config.parallel.max_restarts:
        return start_processes(world, arguments)
    from convolve.app.launch import settle_folder

    folder = None
    if arguments[0] == "train":
        folder = settle_folder(config)
        arguments = [*arguments, "--run-dir", str(folder)]
    return run_attempts(
        lambda words, _: start_processes(world, words),
        arguments,
        folder,
        config.parallel.max_restarts,
        lambda line: print(f"convolve: {line}", file=sys.stderr, flush=True),
    )
