"""Alternating measurements of worker processes, and checks of the results against targets.

The noise of a machine changes from minute to minute. Workers therefore start once, warm up, and then run short turns
one after the other, round by round, while the others sleep. The first round is not counted. Ratios are computed within
a round, and their median is compared with the target. Each worker is a process, so the settings of one (allocator,
threads, libraries) cannot affect another.

This file needs only the standard library, since workers run in environments of other frameworks too.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
INSTALL_SECONDS = 1800.0
Turn = Mapping[str, Any]
Rounds = dict[str, list[Turn]]
_versions: dict[str, str] = {}


class PeerUnavailable(Exception):
    """The reason why another library cannot be compared, in one line."""


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
        passed &= check_ratio("images/s", other, ratios, target)
        if spent := compare(found, ours, other, "images_per_processor_second"):
            report_row("images per CPU second", other, spent)
            print(f"    {median(spent):.2f} by images per CPU second, which other processes affect less")
    return passed


def compare(found: Rounds, ours: str, other: str, figure: str) -> list[float]:
    """Return the ratio of a figure in each round; empty if a worker does not report it."""
    pairs = [(mine.get(figure), theirs.get(figure)) for mine, theirs in zip(found[ours], found[other], strict=True)]
    return [mine / theirs for mine, theirs in pairs if mine and theirs]


def check_ratio(what: str, other: str, ratios: Sequence[float], target: float) -> bool:
    """Print how often we are as good as another, the median over rounds, and return whether it reaches the target."""
    ratio, passed = median(ratios), median(ratios) >= target
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    report_row(what, other, ratios, target=f"at least {target:g}")
    print(f"{what} / {other}: {ratio:.2f}{spread}, at least {target:g}: {_outcome(passed)}", flush=True)
    return passed


def check_limit(what: str, value: float | Sequence[float], limit: float, unit: str) -> bool:
    """Print a value, or the median over rounds, with its limit and return whether it is below."""
    values = list(value) if isinstance(value, Sequence) else [value]
    middle, spread = median(values), f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    report_row(f"{what} ({unit})", "", values, target=f"under {limit:g}")
    print(f"{what}: {middle:.2f}{spread} {unit}, under {limit:g}: {_outcome(middle < limit)}", flush=True)
    return middle < limit


def _outcome(passed: bool) -> str:
    return "reached" if passed else "MISSED"


def report_row(what: str, peer: str, values: Sequence[float], *, target: str = "", note: str = "") -> None:
    """Print a row for the table that `all.py` writes. Without values, `note` gives the reason."""
    row = {"what": what, "peer": peer, "version": _versions.get(peer, ""), "values": list(values)}
    print(f"row {json.dumps(row | {'target': target, 'note': note})}", flush=True)


def our_command(steps: int, *options: str) -> list[str]:
    """Return the command of a worker that trains a config as `convolve train` does, some steps per turn."""
    return [sys.executable, str(HERE / "ours.py"), str(steps), *options]


def loop_command(kind: str, model: str, batch: int, steps: int) -> list[str]:
    """Return the command of a worker that runs a typical PyTorch loop."""
    return [sys.executable, str(HERE / "loops.py"), kind, model, str(batch), str(steps)]


def peer_command(peer: str, packages: Sequence[str], environments: Path, *arguments: str) -> list[str]:
    """Return the command of a worker in the virtual environment of another framework, created on first use."""
    python = peer_python(peer, packages, environments, shared="--no-deps" in packages)
    return [str(python), str(HERE / "peers" / f"{peer}_peer.py"), *arguments]


def peer_python(peer: str, packages: Sequence[str], environments: Path, *, shared: bool = False) -> Path:
    """Return the interpreter of a virtual environment, created on first use; without packages, this one.

    `shared` lets it import what is installed here too, such as torch, so no package is installed twice.
    """
    if not packages:
        return Path(sys.executable)
    environment = environments / peer
    if not (environment / "ready").exists():
        print(f"installing {' '.join(packages)} into {environment}", flush=True)
        _install(environment, packages)
    if shared:  # not before pip runs: it would not install what it finds there
        _share_packages(environment)
    names = [package for package in packages if not package.startswith("-")]
    _versions[peer] = package_version(names[0], environment)
    return environment / "bin" / "python"


def _install(environment: Path, packages: Sequence[str]) -> None:
    venv.create(environment, with_pip=True)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([*pip, *packages], check=True, timeout=INSTALL_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"cannot install {packages[0]} ({type(error).__name__})") from error
    (environment / "ready").touch()


def _share_packages(environment: Path) -> None:
    """Let an environment import what this one can, including what `.pth` files add to it."""
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    _site_packages(environment).joinpath("shared.pth").write_text(f"{line}\n")


def _site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def package_version(package: str, environment: Path) -> str:
    """Return name and version of a package in a virtual environment."""
    name = re.split(r"[<>=\[]", package)[0]
    found = distributions(name=name, path=[str(_site_packages(environment))])
    return next((f"{name} {one.version}" for one in found), name)


def process_tree(root: int) -> dict[int, float]:
    """Return the CPU seconds of a process and of its living descendants, by process id. Needs Linux."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may have ended
            fields = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name)
            parents[process] = int(fields[1])
            seconds[process] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    tree = [root]
    for process in tree:
        tree += [child for child, parent in parents.items() if parent == process]
    return {process: seconds[process] for process in tree if process in seconds}
