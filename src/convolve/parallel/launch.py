"""Starting the processes of one host: the command calls itself once for each rank, through torch's elastic launcher."""

import logging
import os
import sys
from collections.abc import Sequence

from convolve.device import usable_threads


def start_processes(world: int, arguments: Sequence[str], max_restarts: int = 0) -> int:
    """Run `convolve ARGUMENTS` in `world` processes and return the exit code of the first that failed, or 0."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What went wrong is said by the process that met it, in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Cores are shared out; more threads than cores would wait for each other at every barrier.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_threads() // world)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=f"convolve-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "convolve", *arguments)
    except ChildFailedError as error:
        first = min(error.failures.values(), key=lambda failure: failure.timestamp)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0
