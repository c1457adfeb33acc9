"""`convolve launch`: a run on several hosts, started from one of them and supervised until it ends.

A host is reached through a remote shell: a command that takes one more argument, a script for a shell on that host, as
ssh does. The remote shell of a cluster or a container can replace ssh.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from convolve.distributed.launch.agent import STOP, AgentSpec
from convolve.distributed.launch.local import Agent, run_attempts
from convolve.errors import ConfigError, ParallelError
from convolve.interpreter import code_arguments, module_arguments

SSH = "ssh -o BatchMode=yes -o ConnectTimeout={timeout} -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -- {host}"
LOCAL_SHELL = "sh -c"
GRACE_SECONDS = 3.0
# A remote shell would read a name that starts with - as an option, which can run a command.
_HOST = re.compile(r"(?:[A-Za-z0-9._%][A-Za-z0-9._%-]*@)?[A-Za-z0-9._:%][A-Za-z0-9._:%-]*")

_PRINT_VERSIONS = (
    "import json, platform; from importlib.metadata import version as v; "
    "print(json.dumps({'convolve': v('convolve'), 'torch': v('torch'), "
    "'python': '.'.join(platform.python_version_tuple()[:2])}))"
)

LogFn = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """Processes on hosts. `environment` is set on each of them; `timeout` is the connection timeout in seconds."""

    hosts: tuple[str, ...]
    instances: int
    world: int
    master: str
    port: int
    remote_shell: str = SSH
    folder: Path = field(default_factory=Path.cwd)
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    timeout: float = 60.0
    stages: int = 1

    def __post_init__(self) -> None:
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"--hosts {host!r}: not a host name; use letters, digits and . _ : @ %, - not first")
        if self.instances % len(self.hosts):
            raise ConfigError(
                f"--num-instances {self.instances}: must be a multiple of the number of hosts; "
                f"use a multiple of {len(self.hosts)}"
            )
        if self.world % self.instances:
            raise ConfigError(
                f"--num-instances {self.instances}: must divide the {self.world} processes (replicas x shards); "
                f"use a divisor of {self.world}"
            )

    @property
    def agents_per_host(self) -> int:
        return self.instances // len(self.hosts)

    def host_of(self, instance: int) -> str:
        """Return the host of an instance. Hosts are filled in order, so neighboring ranks share one."""
        return self.hosts[instance // self.agents_per_host]

    def reach(self, host: str, script: str) -> list[str]:
        """Return the command that runs a shell script on a host."""
        template = LOCAL_SHELL if host == "localhost" else self.remote_shell
        return [*shlex.split(template.format(host=host, timeout=max(1, round(self.timeout)))), script]

    def script(self, *words: str) -> str:
        """Return a shell script that runs Python with these arguments on a host."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return f"cd {shlex.quote(str(self.folder))} && exec {shlex.join(['env', *settings, self.python, *words])}"

    def command(self, instance: int) -> list[str]:
        """Return the command that starts an agent."""
        return self.reach(self.host_of(instance), self.script(*module_arguments("convolve.distributed.launch.agent")))

    def arguments(self, argv: Sequence[str]) -> list[str]:
        """Return a command for the processes of this job; `train --resume` counts them itself."""
        return [*argv, "--replicas", str(self.world // self.stages)] if argv[0] == "restore" else list(argv)

    def agent_spec(self, instance: int, argv: Sequence[str], attempt: int) -> AgentSpec:
        """Return what an agent runs; every attempt uses the next port."""
        agent = Agent(
            number=instance,
            count=self.instances,
            rdzv_endpoint=f"{self.master}:{self.port + attempt}",
            agents_per_host=self.agents_per_host,
            timeout=self.timeout,
        )
        return AgentSpec(agent, self.world, tuple(argv))


def check_hosts(job: Job) -> None:
    """Raise an error for a host that is unreachable, has no convolve, or has other versions than the first one."""
    for problem in find_problems(job).values():
        raise problem


def find_problems(job: Job) -> dict[str, ParallelError]:
    """Return the hosts that cannot run the job, and why not."""
    processes = {
        host: subprocess.Popen(
            job.reach(host, job.script(*code_arguments(_PRINT_VERSIONS))),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in dict.fromkeys(job.hosts)
    }
    deadline = time.monotonic() + job.timeout
    versions, problems = dict[str, dict[str, str]](), dict[str, ParallelError]()
    try:
        for host, process in processes.items():
            try:
                versions[host] = _read_versions(host, process, deadline)
            except ParallelError as problem:
                problems[host] = problem
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
            # Not read to the end: a child of the remote shell may keep them open for long.
            for stream in (process.stdout, process.stderr):
                assert stream is not None, "both are pipes"
                stream.close()
    first = next(iter(versions), "")
    for host, installed in versions.items():
        if installed != versions[first]:
            other = ", ".join(f"{name} {text}" for name, text in installed.items() if text != versions[first].get(name))
            problems[host] = ParallelError(
                f"host {host}: has {other}, unlike {first}; install the same versions on all hosts"
            )
    return problems


def _read_versions(host: str, process: "subprocess.Popen[str]", deadline: float) -> dict[str, str]:
    try:
        output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ParallelError(f"host {host}: no response; check the host name and the network") from None
    last = (output.strip().splitlines() or [""])[-1]
    try:
        versions: dict[str, str] = json.loads(last)
    except ValueError:
        reason = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise ParallelError(f"host {host}: cannot run convolve ({reason}); check the connection and --python") from None
    return versions


class RemoteAgents:
    """The agents of one attempt."""

    def __init__(self, job: Job, log: LogFn) -> None:
        self._job = job
        self._log = log
        self._grace = GRACE_SECONDS
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def start(self, argv: Sequence[str], attempt: int) -> None:
        """Start all agents."""
        self._processes = [
            subprocess.Popen(
                self._job.command(instance),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            for instance in range(self._job.instances)
        ]
        self._readers = [
            threading.Thread(target=self._relay, args=(process,), daemon=True) for process in self._processes
        ]
        for instance, (process, reader) in enumerate(zip(self._processes, self._readers, strict=True)):
            self._write(process, self._job.agent_spec(instance, argv, attempt).to_line())
            reader.start()

    def wait(self) -> int:
        """Wait for all agents and return 0 or the first exit code that is not 0.

        If one fails, the others have some seconds to print their errors; then all are ended.
        """
        while any(process.poll() is None for process in self._processes):
            if any(process.poll() for process in self._processes):
                self._wait_for_errors()
                break
            time.sleep(0.1)
        failed = list(self._failures())
        self.end()
        for instance, code in failed:
            self._log(f"instance {instance} on {self._job.host_of(instance)} failed with exit code {code}")
        return failed[0][1] if failed else 0

    def stop(self) -> None:
        """Make all ranks save a checkpoint and exit, which may take longer than printing an error."""
        self._grace = max(GRACE_SECONDS, self._job.timeout)
        for process in self._processes:
            self._write(process, f"{STOP}\n")

    def end(self) -> None:
        """End all agents that still run, on all hosts."""
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

    def _wait_for_errors(self) -> None:
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(0.1)

    def _failures(self) -> Iterator[tuple[int, int]]:
        for instance, process in enumerate(self._processes):
            code = process.poll()
            if code:
                yield instance, code if code > 0 else 128 - code

    def _relay(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            self._log(line.rstrip("\n"))

    @staticmethod
    def _write(process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin is not None, "it is a pipe"
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return  # it has exited; `wait` reports its exit code

    @staticmethod
    def _close(process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None, "it is a pipe"
        try:
            process.stdin.close()
        except BrokenPipeError:
            return


def pick_port() -> int:
    """Return a port that other jobs on the same hosts are unlikely to use, with free ports after it for restarts."""
    return 20_000 + os.getpid() * 16 % 12_000


@dataclass(frozen=True)
class LaunchReport:
    """Result of a job."""

    run_dir: Path
    hosts: tuple[str, ...]
    instances: int
    processes: int
    attempts: int
    exit_code: int


def launch(job: Job, argv: Sequence[str], folder: Path, max_restarts: int, log: LogFn) -> LaunchReport:
    """Check the hosts, run the job, and restart it from its newest checkpoint up to `max_restarts` times.

    A restart uses the hosts that respond; one that has returned takes part again.
    """
    check_hosts(job)
    attempts = 0

    def start(attempt: int) -> int:
        nonlocal attempts
        attempts = attempt + 1
        current = job if attempt == 0 else find_hosts(job, log)
        agents = RemoteAgents(current, log)
        try:
            agents.start(current.arguments(argv), attempt)
            with _signals_call(agents.stop):
                return agents.wait()
        finally:
            agents.end()

    code = run_attempts(start, max_restarts, log)
    return LaunchReport(folder, job.hosts, job.instances, job.world, attempts, code)


def find_hosts(job: Job, log: LogFn) -> Job:
    """Return the job on the hosts that respond; on all of them if none does or too few for a replica."""
    problems = find_problems(job)
    hosts = tuple(host for host in job.hosts if host not in problems)
    world = job.world // len(job.hosts) * len(hosts)
    if not problems or not world or world % job.stages:
        return job
    for problem in problems.values():
        log(f"{problem}; continuing without it")
    master = hosts[0] if job.master == job.hosts[0] else job.master
    return replace(job, hosts=hosts, instances=job.agents_per_host * len(hosts), world=world, master=master)


@contextmanager
def _signals_call(stop: Callable[[], None]) -> Iterator[None]:
    """Inside the block, SIGTERM and SIGINT call `stop`; the job then exits after it has saved."""
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
