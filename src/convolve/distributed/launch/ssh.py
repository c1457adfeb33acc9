"""A job over several hosts: where its instances run, how they are reached, and what they say.

A host is reached by a remote shell: words to which one more is added, a text for a shell there. That is what ssh takes;
another one, such as that of a cluster or of a container, can stand in.

`convolve launch`: a training over many hosts, started from one of them and watched until it is done.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from convolve.distributed.launch.agent import STOP, Orders
from convolve.distributed.launch.local import Instance, run_attempts
from convolve.errors import ConfigError, ParallelError

SSH = "ssh -o BatchMode=yes -o ConnectTimeout={timeout} -o ServerAliveInterval=5 -o ServerAliveCountMax=3 {host}"
HERE = "sh -c"
GRACE_SECONDS = 3.0

_VERSIONS = (
    "import json, platform; from importlib.metadata import version as v; "
    "print(json.dumps({'convolve': v('convolve'), 'torch': v('torch'), "
    "'python': '.'.join(platform.python_version_tuple()[:2])}))"
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """Processes over hosts; `environment` is set on each of them."""

    hosts: tuple[str, ...]
    instances: int
    world: int
    master: str
    port: int
    remote_shell: str = SSH
    folder: Path = field(default_factory=Path.cwd)
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    patience: float = 60.0

    def __post_init__(self) -> None:
        if self.instances % len(self.hosts):
            raise ConfigError(
                f"num-instances={self.instances} on {len(self.hosts)} hosts: every host has the same number; give a "
                f"multiple of {len(self.hosts)}"
            )
        if self.world % self.instances:
            raise ConfigError(
                f"num-instances={self.instances} for {self.world} processes (replicas x shards): every instance has "
                f"the same number; give a divisor of {self.world}"
            )

    @property
    def per_host(self) -> int:
        """Instances of each host."""
        return self.instances // len(self.hosts)

    def host_of(self, instance: int) -> str:
        """Instances fill one host after the other, so neighboring ranks share one."""
        return self.hosts[instance // self.per_host]

    def reach(self, host: str, script: str) -> list[str]:
        """The words that run a script for a shell on a host."""
        template = HERE if host == "localhost" else self.remote_shell
        return [*shlex.split(template.format(host=host, timeout=max(1, round(self.patience)))), script]

    def script(self, *words: str) -> str:
        """A text for the shell of a host that runs a Python program there."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return f"cd {shlex.quote(str(self.folder))} && exec {shlex.join(['env', *settings, self.python, *words])}"

    def command(self, instance: int) -> list[str]:
        """The words that start an instance."""
        return self.reach(self.host_of(instance), self.script("-m", "convolve.distributed.launch.agent"))

    def orders(self, instance: int, arguments: Sequence[str], attempt: int) -> Orders:
        """What an instance is told; every attempt meets at a port of its own."""
        meeting_point = f"{self.master}:{self.port + attempt}" if self.instances > 1 else "localhost:0"
        place = Instance(
            instance, self.instances, meeting_point, f"convolve-{self.port}-{attempt}", self.per_host, self.patience
        )
        return Orders(place, self.world, tuple(arguments))


def check_hosts(job: Job) -> None:
    """Name a host that cannot be reached in time, has no convolve, or has other versions than the first one."""
    asked = {
        host: subprocess.Popen(
            job.reach(host, job.script("-c", _VERSIONS)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in dict.fromkeys(job.hosts)
    }
    deadline = time.monotonic() + job.patience
    try:
        found = {host: _read_versions(host, process, deadline) for host, process in asked.items()}
    finally:
        for process in asked.values():
            process.kill()
            process.wait()
            # Not read to their ends: a child of the remote shell may hold them open for long.
            for stream in (process.stdout, process.stderr):
                assert stream is not None, "both were asked for"
                stream.close()
    first = job.hosts[0]
    for host, versions in found.items():
        if versions != found[first]:
            other = ", ".join(f"{name} {one}" for name, one in versions.items() if one != found[first].get(name))
            raise ParallelError(f"host {host} has {other}, unlike {first}; install the same versions on all hosts")


def _read_versions(host: str, process: "subprocess.Popen[str]", deadline: float) -> dict[str, str]:
    try:
        output, complaint = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ParallelError(f"host {host} does not answer; check its name and the way to it") from None
    last = (output.strip().splitlines() or [""])[-1]
    try:
        versions: dict[str, str] = json.loads(last)
    except ValueError:
        why = (complaint.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise ParallelError(
            f"host {host} cannot run convolve there ({why}); check the way to it and --python"
        ) from None
    return versions


class Crew:
    """The instances of one attempt."""

    def __init__(self, job: Job, arguments: Sequence[str], attempt: int, say: Say) -> None:
        self._job = job
        self._say = say
        self._grace = GRACE_SECONDS
        self._processes = [
            subprocess.Popen(
                job.command(instance),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            for instance in range(job.instances)
        ]
        self._readers = [
            threading.Thread(target=self._relay, args=(process,), daemon=True) for process in self._processes
        ]
        for instance, (process, reader) in enumerate(zip(self._processes, self._readers, strict=True)):
            self._tell(process, job.orders(instance, arguments, attempt).to_line())
            reader.start()

    def wait(self) -> int:
        """Wait for all; when one fails the others have a moment to say why, then all are ended. The first exit code."""
        while any(process.poll() is None for process in self._processes):
            if any(process.poll() for process in self._processes):
                self._give_grace()
                break
            time.sleep(0.1)
        failed = list(self._failures())
        self.end()
        for instance, code in failed:
            self._say(f"instance {instance} on {self._job.host_of(instance)} ended with exit code {code}")
        return failed[0][1] if failed else 0

    def stop(self) -> None:
        """Ask all ranks to save and end; that may take longer than a last word."""
        self._grace = max(GRACE_SECONDS, self._job.patience)
        for process in self._processes:
            self._tell(process, f"{STOP}\n")

    def end(self) -> None:
        """End whatever is left, on all hosts."""
        for process in self._processes:
            if process.stdin is not None and not process.stdin.closed:
                self._close(process)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes:
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for process, reader in zip(self._processes, self._readers, strict=True):
            reader.join(timeout=GRACE_SECONDS)
            if process.stdout is not None and not reader.is_alive():
                process.stdout.close()

    def _give_grace(self) -> None:
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(0.1)

    def _failures(self) -> Iterator[tuple[int, int]]:
        for instance, process in enumerate(self._processes):
            code = process.poll()
            if code:
                yield instance, code if code > 0 else 128 - code

    def _relay(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None, "it was asked for"
        for line in process.stdout:
            self._say(line.rstrip("\n"))

    @staticmethod
    def _tell(process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin is not None, "it was asked for"
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except (BrokenPipeError, ValueError):
            # It is gone already; its exit code tells.
            return

    @staticmethod
    def _close(process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None, "it was asked for"
        try:
            process.stdin.close()
        except BrokenPipeError:
            return


def pick_port() -> int:
    """A port that another job on the same hosts is unlikely to have picked, with room for restarts after it."""
    return 20_000 + os.getpid() * 16 % 12_000


@dataclass(frozen=True)
class LaunchReport:
    """How a job ended."""

    run_dir: Path
    hosts: tuple[str, ...]
    instances: int
    processes: int
    attempts: int
    exit_code: int


def launch(job: Job, arguments: Sequence[str], folder: Path, max_restarts: int, say: Say) -> LaunchReport:
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
