"""`convolve launch`: a training over many hosts, started from one of them and watched until it is done."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from convolve.config import Config
from convolve.parallel.hosts import Crew, Job, Say, check_hosts
from convolve.parallel.launch import run_attempts
from convolve.report.folder import claim_run_folder


@dataclass(frozen=True)
class LaunchReport:
    """How a job ended."""

    run_dir: Path
    hosts: tuple[str, ...]
    instances: int
    processes: int
    attempts: int
    exit_code: int


def settle_folder(config: Config) -> Path:
    """The folder of a run that is not there yet, decided before any process starts, so that a restart finds it."""
    return (config.run.run_dir or claim_run_folder(config.run, config.name)).absolute()


def run(job: Job, arguments: Sequence[str], folder: Path, max_restarts: int, say: Say) -> LaunchReport:
    """Check the hosts, start the job, and start it again from its newest checkpoint while it may."""
    check_hosts(job)
    attempts = 0

    def start(words: Sequence[str], attempt: int) -> int:
        nonlocal attempts
        attempts = attempt + 1
        crew = Crew(job, words, attempt, say)
        try:
            with _Relayed(crew.stop):
                return crew.wait()
        finally:
            crew.end()

    code = run_attempts(start, arguments, folder, max_restarts, say)
    return LaunchReport(folder, job.hosts, job.instances, job.world, attempts, code)


class _Relayed:
    """While entered, a wish to stop is handed on, and the job ends by itself once it has saved."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def __enter__(self) -> None:
        self._before = {one: signal.signal(one, self._hand_on) for one in (signal.SIGTERM, signal.SIGINT)}

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self._stop()
