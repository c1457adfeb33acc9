"""Start the processes of a run on this host: one `convolve` command per rank.

An agent starts the ranks of one host, or an equal part of them. If a rank fails, the others are stopped and the whole
job is restarted from its newest checkpoint.

Ranks find each other without a service that others could reach. The ranks of a single agent meet in a file inside a
private folder and communicate over the loopback interface. Those of several agents meet at a TCP store of rank 0, which
listens on the rendezvous address only. Nothing that is exchanged is pickled. (torch's elastic launcher is not used: its
rendezvous listens on all interfaces and unpickles what it receives.)
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from convolve.device import available_threads
from convolve.interpreter import module_command

USER_ERROR = 2
STOPPED = (129, 130, 143)
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
LAUNCHER_VARIABLE = "CONVOLVE_LAUNCHER"
STORE_VARIABLE = "CONVOLVE_STORE"
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 30.0  # to save a checkpoint after a signal
_FAILURE_GRACE_SECONDS = 5.0  # without a rank, the others can only end
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Agent:
    """One launcher among `count`: its number, the rendezvous of all of them, and the connection timeout in seconds."""

    number: int = 0
    count: int = 1
    rdzv_endpoint: str = ""
    agents_per_host: int = 1
    timeout: float = 60.0


SINGLE_AGENT = Agent()


def start_processes(
    world: int,
    argv: Sequence[str],
    agent: Agent = SINGLE_AGENT,
    *,
    tagged: bool = False,
    module: str = "convolve",
    on_poll: Callable[[], int | None] = lambda: None,
) -> int:
    """Run `convolve ARGV`, or another module, in this agent's fraction of `world` processes.

    Returns 0 or the exit code of the first process that failed; 128 + the number of a signal that asked to stop. The
    cores of a host are divided among its agents. `tagged` prefixes each line of output with the rank.
    """
    count = world // agent.count
    with _rendezvous(agent) as variables, _Ranks() as ranks:
        for local in range(count):
            rank = agent.number * count + local
            environment = {
                **os.environ,
                **variables,
                # More threads than cores would wait for each other at every barrier.
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", _threads(count * agent.agents_per_host)),
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(world),
                LAUNCHER_VARIABLE: str(os.getpid()),
            }
            ranks.start(rank, module_command(module, *argv), environment, tagged=tagged)
        return ranks.wait(on_poll)


def _threads(processes: int) -> str:
    return str(max(1, available_threads() // processes))


@contextmanager
def _rendezvous(agent: Agent) -> Iterator[dict[str, str]]:
    """Yield the variables by which ranks find each other."""
    if agent.count > 1:
        host, _, port = agent.rdzv_endpoint.rpartition(":")
        yield {"MASTER_ADDR": host, "MASTER_PORT": port}
        return
    folder = tempfile.mkdtemp(prefix="convolve-")
    try:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", _LOOPBACK)
        yield {STORE_VARIABLE: str(Path(folder) / "store"), "GLOO_SOCKET_IFNAME": interface}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Ranks:
    """The processes of an agent. Each runs in a new session, so a Ctrl-C reaches it through the agent only."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._relays: list[threading.Thread] = []
        self._handlers: dict[int, object] = {}
        self._signal: int | None = None

    def __enter__(self) -> "_Ranks":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {
                number: signal.signal(number, self._forward)
                for number in STOP_SIGNALS
                if signal.getsignal(number) is not signal.SIG_IGN
            }
        return self

    def __exit__(self, *error: object) -> None:
        self._stop(signal.SIGTERM, _FAILURE_GRACE_SECONDS)
        for relay in self._relays:
            relay.join()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def start(self, rank: int, command: list[str], environment: Mapping[str, str], *, tagged: bool) -> None:
        pipe = subprocess.PIPE if tagged else None
        unbuffered = {"PYTHONUNBUFFERED": "1"} if tagged else {}
        process = subprocess.Popen(
            command, env={**environment, **unbuffered}, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self._processes.append(process)
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                relay = threading.Thread(target=_relay, args=(source, sink, f"[rank {rank}] "), daemon=True)
                relay.start()
                self._relays.append(relay)

    def wait(self, on_poll: Callable[[], int | None] = lambda: None) -> int:
        """Wait until all processes end or one fails; a signal that `on_poll` returns is sent to them, once."""
        while True:
            number = on_poll()
            if number is not None and self._signal is None:
                self._forward(number, None)
            codes = [process.poll() for process in self._processes]
            failed = next((code for code in codes if code), None)
            if failed is None and None in codes:
                time.sleep(_POLL_SECONDS)
                continue
            if self._signal is not None:
                self._stop(self._signal, _GRACE_SECONDS)
                return 128 + self._signal
            return 0 if failed is None else failed if failed > 0 else 128 - failed

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Ask all ranks to stop; they save a checkpoint after the step in progress."""
        self._signal = number
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _stop(self, number: int, grace: float) -> None:
        """End what still runs: ask first, then kill."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.send_signal(number)
        deadline = time.monotonic() + grace
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _relay(source: IO[str], sink: IO[str], prefix: str) -> None:
    with source:
        for line in source:  # to the end also without a sink: a rank that cannot write would wait forever
            with suppress(OSError, ValueError):
                sink.write(prefix + line)
                sink.flush()


def follow_launcher() -> None:
    """Exit immediately when the launcher that started this process is gone: an orphan must not save."""
    if LAUNCHER_VARIABLE not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()


StartFn = Callable[[int], int]
"""Runs an attempt, given its number, and returns the exit code."""

MAX_PAUSE_SECONDS = 60.0


def run_attempts(
    start: StartFn, max_restarts: int, log: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> int:
    """Run attempts until one succeeds, at most `max_restarts` + 1. A user error or a requested stop is not retried.

    The pause between attempts doubles each time: a host may need a minute to return.
    """
    for attempt in range(max_restarts + 1):
        code = start(attempt)
        if code in (0, USER_ERROR, *STOPPED) or attempt == max_restarts:
            return code
        pause = min(2.0**attempt, MAX_PAUSE_SECONDS)
        log(f"attempt {attempt + 1} of {max_restarts + 1} failed with exit code {code}; restarting in {pause:g} s")
        sleep(pause)
    raise AssertionError("the last attempt returns")
