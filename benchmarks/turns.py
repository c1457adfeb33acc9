"""Alternating measurements of worker processes, and checks of the results against targets.

The noise of a machine changes from minute to minute. Workers therefore start once, warm up, and then run short turns
one after the other, round by round, while the others sleep. The first round is not counted. Ratios are computed within
a round, and their median is compared with the target. Each worker is a process, so the settings of one (allocator,
threads, libraries) cannot affect another.

This file needs only the standard library, since workers run in environments of other frameworks too.
"""

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
Turn = Mapping[str, Any]
Rounds = dict[str, list[Turn]]


class Worker:
    """Child process that runs a turn for every line it receives, and prints the measurement as JSON."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def run(self) -> Turn:
        """Run one turn and return its measurement."""
        assert self._process.stdin is not None
        print("turn", file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Turn:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("turn "):
                turn: Turn = json.loads(line.removeprefix("turn "))
                return turn
        self.close()
        sys.exit(f"{self.name} exited with status {self._process.returncode}; its output is above")

    def close(self) -> None:
        """Close the input of the process, which ends it, and wait."""
        with self._process:
            pass


def serve(measure: Callable[[], Turn]) -> None:
    """Run a worker: report that it is ready, then run a turn for every input line."""
    print("turn {}", flush=True)
    for _ in sys.stdin:
        print(f"turn {json.dumps(measure())}", flush=True)


def timed(work: Callable[[], int]) -> Callable[[], Turn]:
    """Return a turn that measures work, which returns its number of images."""

    def measure() -> Turn:
        start, cpu_start = time.perf_counter(), time.process_time()
        images = work()
        took, spent = time.perf_counter() - start, time.process_time() - cpu_start
        return {"images_per_second": images / took, "images_per_processor_second": images / spent}

    return measure


@contextmanager
def open_workers(commands: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Worker]]:
    """Start the workers one after the other, so each warms up undisturbed."""
    with ExitStack() as stack:
        workers = {}
        for name, command in commands.items():
            workers[name] = Worker(name, command)
            stack.callback(workers[name].close)
        yield workers


def take_turns(commands: Mapping[str, Sequence[str]], rounds: int) -> Rounds:
    """Run all workers in turns, print every turn and return the counted ones."""
    found: Rounds = {name: [] for name in commands}
    with open_workers(commands) as workers:
        for number in range(rounds + 1):
            for name, worker in workers.items():
                turn = worker.run()
                if number:
                    found[name].append(turn)
                counted = f"round {number}" if number else "not counted"
                print(f"{counted:<15} {name:<28} {turn['images_per_second']:>10,.1f} images/s", flush=True)
    return found


def check_ratios(found: Rounds, ours: str, targets: Mapping[str, float]) -> bool:
    """Return whether the speed ratio to each of the other workers reaches its target."""
    passed = True
    for other, target in targets.items():
        ratios = compare(found, ours, other, "images_per_second")
        passed &= check_ratio(f"{ours} / {other}", median(ratios), target, spread=(min(ratios), max(ratios)))
        if spent := compare(found, ours, other, "images_per_processor_second"):
            print(f"    {median(spent):.2f} by images per CPU second, which other processes affect less")
    return passed


def compare(found: Rounds, ours: str, other: str, figure: str) -> list[float]:
    """Return the ratio of a figure in each round; empty if a worker does not report it."""
    pairs = [(mine.get(figure), theirs.get(figure)) for mine, theirs in zip(found[ours], found[other], strict=True)]
    return [mine / theirs for mine, theirs in pairs if mine and theirs]


def check_ratio(name: str, ratio: float, target: float, *, spread: tuple[float, float] | None = None) -> bool:
    """Print a ratio with its target and return whether it is reached."""
    interval = "" if spread is None else f" ({spread[0]:.2f} to {spread[1]:.2f})"
    print(
        f"{name}: {ratio:.2f}{interval}, at least {target:g}: {'reached' if ratio >= target else 'MISSED'}", flush=True
    )
    return ratio >= target


def check_limit(name: str, value: float, limit: float, unit: str) -> bool:
    """Print a value with its limit and return whether it is below."""
    print(f"{name}: {value:.2f} {unit}, under {limit:g}: {'kept' if value < limit else 'MISSED'}", flush=True)
    return value < limit


def our_command(steps: int, *options: str) -> list[str]:
    """Return the command of a worker that trains a config as `convolve train` does, some steps per turn."""
    return [sys.executable, str(HERE / "ours.py"), str(steps), *options]


def loop_command(kind: str, model: str, batch: int, steps: int) -> list[str]:
    """Return the command of a worker that runs a typical PyTorch loop."""
    return [sys.executable, str(HERE / "loops.py"), kind, model, str(batch), str(steps)]


def peer_command(peer: str, packages: Sequence[str], environments: Path, *arguments: str) -> list[str]:
    """Return the command of a worker in the virtual environment of another framework, created on first use."""
    environment = environments / peer
    if not (environment / "ready").exists():
        print(f"installing {' '.join(packages)} into {environment}", flush=True)
        venv.create(environment, with_pip=True)
        subprocess.run([environment / "bin" / "pip", "install", "--quiet", *packages], check=True)
        (environment / "ready").touch()
    return [str(environment / "bin" / "python"), str(HERE / "peers" / f"{peer}_peer.py"), *arguments]
