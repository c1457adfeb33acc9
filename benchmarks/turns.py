"""What the benchmarks share: players in processes of their own take turns, and ratios are held against bars.

A machine is noisy, and its noise changes from minute to minute. So players are started once, warm up, and then play
short turns, one after the other, round by round; a player that is not on turn sleeps. The first round does not count.
Ratios are those of the turns of one round, and their median is what a bar is held against. Players have processes of
their own, so that the settings of one (its allocator, its threads, its libraries) cannot help or harm another.

This file needs nothing but Python, since players run in environments of other frameworks too.
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


class Player:
    """A child process that plays a turn for every line it gets, and answers with what it measured."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._listen()

    def play(self) -> Turn:
        """One turn."""
        assert self._process.stdin is not None
        print("turn", file=self._process.stdin, flush=True)
        return self._listen()

    def _listen(self) -> Turn:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("turn "):
                answer: Turn = json.loads(line.removeprefix("turn "))
                return answer
        self.close()
        sys.exit(f"{self.name} ended with status {self._process.returncode}; its words are above")

    def close(self) -> None:
        """Let the process end: there will be no more turns."""
        with self._process:
            pass


def serve(play: Callable[[], Turn]) -> None:
    """The other end: say that all is ready, then play a turn for every line, until there are no more."""
    print("turn {}", flush=True)
    for _ in sys.stdin:
        print(f"turn {json.dumps(play())}", flush=True)


def timed(work: Callable[[], int]) -> Callable[[], Turn]:
    """A turn of some work that returns how many images it did."""

    def play() -> Turn:
        began, worked = time.perf_counter(), time.process_time()
        images = work()
        took, spent = time.perf_counter() - began, time.process_time() - worked
        return {"images_per_second": images / took, "images_per_processor_second": images / spent}

    return play


@contextmanager
def playing(commands: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Player]]:
    """Players, started one after the other so that each warms up undisturbed."""
    with ExitStack() as stack:
        players = {}
        for name, command in commands.items():
            players[name] = Player(name, command)
            stack.callback(players[name].close)
        yield players


def take_turns(commands: Mapping[str, Sequence[str]], rounds: int) -> Rounds:
    """Every turn that counts of every player, printed as they come."""
    found: Rounds = {name: [] for name in commands}
    with playing(commands) as players:
        for number in range(rounds + 1):
            for name, player in players.items():
                turn = player.play()
                if number:
                    found[name].append(turn)
                counted = f"round {number}" if number else "does not count"
                print(f"{counted:<15} {name:<28} {turn['images_per_second']:>10,.1f} images/s", flush=True)
    return found


def hold(found: Rounds, ours: str, bars: Mapping[str, float]) -> bool:
    """Whether we are at least as many times as fast as each of the others as its bar says."""
    held = True
    for other, bar in bars.items():
        ratios = compare(found, ours, other, "images_per_second")
        held &= tell(f"{ours} / {other}", median(ratios), bar, spread=(min(ratios), max(ratios)))
        if spent := compare(found, ours, other, "images_per_processor_second"):
            print(f"    {median(spent):.2f} by images for each second of the processors, which others disturb less")
    return held


def compare(found: Rounds, ours: str, other: str, figure: str) -> list[float]:
    """The ratio of a figure in each round; none where a player does not tell it."""
    pairs = [(mine.get(figure), theirs.get(figure)) for mine, theirs in zip(found[ours], found[other], strict=True)]
    return [mine / theirs for mine, theirs in pairs if mine and theirs]


def tell(what: str, ratio: float, bar: float, *, spread: tuple[float, float] | None = None) -> bool:
    """Print a ratio beside its bar; whether it is reached."""
    between = "" if spread is None else f" ({spread[0]:.2f} to {spread[1]:.2f})"
    print(f"{what}: {ratio:.2f}{between}, at least {bar:g}: {'reached' if ratio >= bar else 'MISSED'}", flush=True)
    return ratio >= bar


def within(what: str, value: float, limit: float, unit: str) -> bool:
    """Print a value beside its limit; whether it stays below."""
    print(f"{what}: {value:.2f} {unit}, under {limit:g}: {'kept' if value < limit else 'MISSED'}", flush=True)
    return value < limit


def our_command(steps: int, *options: str) -> list[str]:
    """A player that trains a config as `convolve train` would, some steps in each turn."""
    return [sys.executable, str(HERE / "ours.py"), str(steps), *options]


def loop_command(kind: str, network: str, batch: int, steps: int) -> list[str]:
    """A player that is a PyTorch loop as people write it."""
    return [sys.executable, str(HERE / "loops.py"), kind, network, str(batch), str(steps)]


def peer_command(peer: str, packages: Sequence[str], environments: Path, *arguments: str) -> list[str]:
    """A player in the virtual environment of another framework, which is made by pip the first time."""
    home = environments / peer
    if not (home / "ready").exists():
        print(f"installing {' '.join(packages)} into {home}", flush=True)
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin" / "pip", "install", "--quiet", *packages], check=True)
        (home / "ready").touch()
    return [str(home / "bin" / "python"), str(HERE / "peers" / f"{peer}_peer.py"), *arguments]
