"""Starting processes: the command calls itself once for each rank, through torch's elastic launcher.

An instance is one such launcher with its ranks. A host has one of them or several; together they make a job. A job
that lost a rank is started again as a whole, from its newest checkpoint: nothing half-alive is patched.

A verb in processes of its own on this host.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from convolve.device import available_threads
from convolve.run_files import CHECKPOINT_GLOB, CHECKPOINTS_FOLDER

USER_ERROR = 2
STOPPED = (130, 143)


@dataclass(frozen=True)
class Instance:
    """One launcher among several: its number, where all of them meet, and how long they wait for each other."""

    number: int = 0
    count: int = 1
    meeting_point: str = "localhost:0"
    job: str = ""
    neighbors: int = 1
    patience: float = 60.0


ONLY = Instance()


def start_processes(world: int, arguments: Sequence[str], instance: Instance = ONLY, *, tagged: bool = False) -> int:
    """Run `convolve ARGUMENTS` in this instance's share of `world` processes; the exit code of the first that failed.

    `neighbors` instances share this host, and its cores are shared out; `tagged` puts the rank before each line.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    own = world // instance.count
    # More threads than cores would wait for each other at every barrier.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_threads() // (own * instance.neighbors))))
    several = instance.count > 1
    config = LaunchConfig(
        min_nodes=instance.count,
        max_nodes=instance.count,
        nproc_per_node=own,
        run_id=instance.job or f"convolve-{os.getpid()}",
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=instance.meeting_point,
        rdzv_configs={"rank": instance.number, "timeout": instance.patience} if several else {},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(tee=Std.ALL) if tagged else None,
        log_line_prefix_template="[rank ${rank}] " if tagged else None,
    )
    # What went wrong is said by the process that met it, in one line.
    logging.disable(logging.CRITICAL)
    try:
        elastic_launch(config, sys.executable)("-m", "convolve", *arguments)
    except ChildFailedError as error:
        first = min(error.failures.values(), key=lambda failure: failure.timestamp)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as stop:
        return 128 + int(stop.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def follow_launcher() -> None:
    """End this process at once when the launcher that started it is gone; an orphan must not go on and save."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()


Start = Callable[[Sequence[str], int], int]


def run_attempts(
    start: Start, arguments: Sequence[str], folder: Path | None, max_restarts: int, say: Callable[[str], None]
) -> int:
    """Run a command, and up to `max_restarts` times more after a failure, each from the newest checkpoint in `folder`.

    A user's mistake is not repeated, and who asks a job to stop does not want it back.
    """
    for attempt in range(max_restarts + 1):
        code = start(next_arguments(arguments, folder, attempt), attempt)
        if code in (0, USER_ERROR, *STOPPED) or attempt == max_restarts:
            return code
        say(f"attempt {attempt + 1} of {max_restarts + 1} ended with exit code {code}; starting again")
    raise AssertionError("the last attempt returns")


def next_arguments(arguments: Sequence[str], folder: Path | None, attempt: int) -> list[str]:
    """What to run: the command itself, or, once there is a checkpoint, the restore of its run.

    What an attempt without a checkpoint left behind is moved aside, not deleted.
    """
    if attempt == 0 or folder is None or arguments[0] != "train":
        return list(arguments)
    if any((folder / CHECKPOINTS_FOLDER).glob(CHECKPOINT_GLOB)):
        return ["restore", str(folder), *(word for word in arguments if word == "--json")]
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}-attempt-{attempt}"))
    return list(arguments)
