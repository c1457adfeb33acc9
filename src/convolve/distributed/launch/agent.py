"""One instance of a job on its host: `python -m convolve.distributed.launch.agent`, started by `convolve launch`.

It takes its orders from standard input. The first line says what to run; a line `stop` asks the ranks to save and end;
and when the input ends, because the launcher or the way to it is gone, everything ends at once.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from typing import TextIO

from convolve.distributed.launch.local import Instance, start_processes

STOP = "stop"


@dataclass(frozen=True)
class Orders:
    """What an instance is told."""

    instance: Instance
    world: int
    arguments: tuple[str, ...]

    def to_line(self) -> str:
        """The orders as a line of text."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Orders":
        """The orders in a line of text."""
        told = json.loads(line)
        return cls(Instance(**told["instance"]), told["world"], tuple(told["arguments"]))


def obey(orders: TextIO) -> None:
    """Wait for further orders; never returns while there may be some."""
    for line in orders:
        if line.strip() == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
    # The ranks follow their launcher.
    os._exit(1)


def main() -> int:
    """Run what is asked for, and return its exit code."""
    orders = Orders.from_line(sys.stdin.readline())
    threading.Thread(target=obey, args=(sys.stdin,), daemon=True).start()
    return start_processes(orders.world, orders.arguments, orders.instance, tagged=True)


if __name__ == "__main__":
    sys.exit(main())
