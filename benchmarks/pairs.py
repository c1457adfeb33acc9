"""Benchmark workers of two processes: the first one runs a turn for each input line, the second one follows it."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable

from turns import Turn, serve


def open_pair() -> int:
    """Start this program again as rank 1, unless this is rank 1. Return the rank of this process."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", LOCAL_RANK="0")
    subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"})
    os.environ["RANK"] = "0"
    return 0


def serve_pair(rank: int, measure: Callable[[], Turn], any_rank: Callable[[bool], bool]) -> None:
    """Run turns together until the input of rank 0 ends; `any_rank` returns whether a rank passed True."""
    if rank:
        while not any_rank(False):
            measure()
        return

    def measure_together() -> Turn:
        any_rank(False)
        return measure()

    serve(measure_together)
    any_rank(True)
