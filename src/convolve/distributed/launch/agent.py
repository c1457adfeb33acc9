"""Program on each host of a job, started by `convolve launch`: the module `convolve.distributed.launch.agent`.

It reads standard input. The first line is an `AgentSpec`. A line `stop` makes the ranks save a checkpoint and exit.
When the input ends, because the launcher or the connection is gone, everything exits immediately.

In a pod of Kubernetes there is no launcher: the spec is an argument, and standard input is not read.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from convolve.distributed.launch.local import Agent, start_processes

STOP = "stop"


@dataclass(frozen=True)
class AgentSpec:
    """What an agent runs: its place among all agents, the number of processes, and the arguments of `convolve`."""

    agent: Agent
    world: int
    argv: tuple[str, ...]

    def to_line(self) -> str:
        """Return the spec as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "AgentSpec":
        """Return the spec in a line of JSON."""
        values = json.loads(line)
        return cls(Agent(**values["agent"]), values["world"], tuple(values["argv"]))


def read_commands(commands: TextIO) -> None:
    """Execute commands until the input ends, then exit the process."""
    for line in commands:
        if line.strip() == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
    # The ranks follow their launcher.
    os._exit(1)


def main(argv: Sequence[str]) -> int:
    """Run the spec in the arguments or on standard input, and return its exit code."""
    spec = AgentSpec.from_line(argv[0] if argv else sys.stdin.readline())
    if not argv:
        threading.Thread(target=read_commands, args=(sys.stdin,), daemon=True).start()
    return start_processes(spec.world, spec.argv, spec.agent, tagged=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
