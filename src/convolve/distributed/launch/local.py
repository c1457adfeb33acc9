"""Start the processes of a run: one `convolve` command per rank, through torch's elastic launcher.

An agent is one such launcher with its ranks. Each host of a job has one or more agents. If a rank fails, the whole job
is restarted from its newest checkpoint.
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
class Agent:
    """One launcher among `count`: its number, the rendezvous of all of them, and the connection timeout in seconds."""

    number: int = 0
    count: int = 1
    rdzv_endpoint: str = "localhost:0"
    run_id: str = ""
    agents_per_host: int = 1
    timeout: float = 60.0


SINGLE_AGENT = Agent()


def start_processes(world: int, argv: Sequence[str], agent: Agent = SINGLE_AGENT, *, tagged: bool = False) -> int:
    """Run `convolve ARGV` in this agent's fraction of `world` processes.

    Returns 0 or the exit code of the first process that failed. The cores of a host are divided among its agents.
    `tagged` prefixes each line of output with the rank.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    processes = world // agent.count
    # More threads than cores would wait for each other at every barrier.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_threads() // (processes * agent.agents_per_host))))
    several = agent.count > 1
    config = LaunchConfig(
        min_nodes=agent.count,
        max_nodes=agent.count,
        nproc_per_node=processes,
        run_id=agent.run_id or f"convolve-{os.getpid()}",
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=agent.rdzv_endpoint,
        rdzv_configs={"rank": agent.number, "timeout": agent.timeout} if several else {},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(tee=Std.ALL) if tagged else None,
        log_line_prefix_template="[rank ${rank}] " if tagged else None,
    )
    # The failing rank has already printed its error; silence the elastic agent.
    logging.disable(logging.CRITICAL)
    try:
        elastic_launch(config, sys.executable)("-m", "convolve", *argv)
    except ChildFailedError as error:
        first = min(error.failures.values(), key=lambda failure: failure.timestamp)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as stop:
        return 128 + int(stop.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def follow_launcher() -> None:
    """Exit immediately when the launcher that started this process is gone: an orphan must not save."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()


StartFn = Callable[[Sequence[str], int], int]
"""Runs the arguments of an attempt, given its number, and returns the exit code."""


def run_attempts(
    start: StartFn, argv: Sequence[str], folder: Path | None, max_restarts: int, log: Callable[[str], None]
) -> int:
    """Run a command, and restart it up to `max_restarts` times from the newest checkpoint in `folder` if it fails.

    A user error or a requested stop is not retried.
    """
    for attempt in range(max_restarts + 1):
        code = start(next_argv(argv, folder, attempt), attempt)
        if code in (0, USER_ERROR, *STOPPED) or attempt == max_restarts:
            return code
        log(f"attempt {attempt + 1} of {max_restarts + 1} failed with exit code {code}; restarting")
    raise AssertionError("the last attempt returns")


def next_argv(argv: Sequence[str], folder: Path | None, attempt: int) -> list[str]:
    """Return the command of an attempt: `argv`, or `restore` if the run has a checkpoint.

    The folder of an attempt without a checkpoint is renamed, not deleted.
    """
    if attempt == 0 or folder is None or argv[0] != "train":
        return list(argv)
    if any((folder / CHECKPOINTS_FOLDER).glob(CHECKPOINT_GLOB)):
        return ["restore", str(folder), *(word for word in argv if word == "--json")]
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}-attempt-{attempt}"))
    return list(argv)
