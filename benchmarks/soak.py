"""An hour of training and serving, watched from outside: memory and open files must stay flat.

    python benchmarks/soak.py [--minutes 60] [--share 0.1] [--pause 0.3]

Three processes of their own:

    many      one short training after the other in one process, each with validation, curves and report
    long      one training that goes on all the time, with a checkpoint and a validation in each of its short epochs
    serve     a server of the long run, which takes each better checkpoint, under a light mix of good and bad requests

The trainings are stopped and woken up again so that each takes about `--share` of a core. Every few seconds the memory
that a process does not share with files (RssAnon), its open files and its threads are read. The first fifth is left
out, since caches fill then. Of the rest:

    slope     the median of all slopes between two readings (Theil and Sen), which an outlier cannot tilt
    growth    slope x time: less than `--most-growth` of the memory, 2 % by default
    files     no more at their lowest in the last quarter than in the first

Prints one table, then what does not hold; exits 1 if anything does not, or if a process ended or failed on the way.
"""

import argparse
import http.client
import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from serve_load import Served

READING_SECONDS = 5.0
CYCLE_SECONDS = 2.0
WARM_UP_SHARE = 0.2
FEWEST_READINGS = 12
IDLE_SECONDS = 3.0
ASKED_LEAST = 20
STALE = "idle connections that the server had closed"
FINE = ("as expected", STALE)
LONG = ["--config", "lenet-digits", "--epochs", "1000000", "--ckpts-per-epoch", "1", "--keep-checkpoints", "3"]
SHORT = {"epochs": 1, "threads": 1, "ckpts_per_epoch": 2}


@dataclass
class Readings:
    """What one process was seen to hold, over time."""

    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def add(self, pid: int, now: float) -> None:
        status = Path(f"/proc/{pid}/status").read_text()
        found = {name: int(re.findall(rf"{name}:\s+(\d+)", status)[0]) for name in ("RssAnon", "Threads")}
        self.seconds.append(now)
        self.megabytes.append(found["RssAnon"] / 1024)
        self.files.append(len(os.listdir(f"/proc/{pid}/fd")))
        self.threads.append(found["Threads"])

    def settled(self) -> "Readings":
        """Without the time in which caches fill."""
        first = round(len(self.seconds) * WARM_UP_SHARE)
        return Readings(self.seconds[first:], self.megabytes[first:], self.files[first:], self.threads[first:])

    @property
    def slope(self) -> float:
        """MiB per hour."""
        pairs = itertools.combinations(zip(self.seconds, self.megabytes, strict=True), 2)
        return 3600 * float(np.median([(second[1] - first[1]) / (second[0] - first[0]) for first, second in pairs]))

    @property
    def growth(self) -> float:
        """The part of the memory by which it grew, along the slope."""
        return self.slope * (self.seconds[-1] - self.seconds[0]) / 3600 / float(np.median(self.megabytes))

    def quarters(self, values: list[int]) -> tuple[int, int]:
        """The fewest in the first and in the last quarter: what is open for a moment does not count, a leak does."""
        size = max(1, len(values) // 4)
        return min(values[:size]), min(values[-size:])


class Worker:
    """A training in a process of its own, which sleeps for most of the time."""

    def __init__(self, words: list[str]) -> None:
        self.process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        return self.process.pid

    def breathe(self, share: float, until: float) -> None:
        """Let it work for a part of each cycle."""
        while time.monotonic() < until and self.process.poll() is None:
            for number, part in ((signal.SIGCONT, share), (signal.SIGSTOP, 1 - share)):
                self.process.send_signal(number)
                time.sleep(CYCLE_SECONDS * part)
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(120)


def train_again_and_again(folder: Path) -> None:
    """The body of the process `many`: it goes on until it is told to end, and counts what it did."""
    from convolve.config.loading import resolve
    from convolve.loggers.base import SilentConsole
    from convolve.runs import session

    for number in itertools.count(1):
        run_dir = folder / f"short-{number}"
        report = session.train(resolve("lenet-digits", None, {**SHORT, "run_dir": run_dir}).config, SilentConsole())
        if report.stopped_by is not None:
            return
        (folder / "trainings").write_text(str(number))
        shutil.rmtree(run_dir)


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def ask(port: int, pause: float, until: float, statuses: Counter[str]) -> None:
    """Pictures, pages and nonsense, one after the other, each on a connection of its own now and then."""
    good, last = picture(), time.monotonic()
    requests = [
        ("POST", "/predict", good, "200"),
        ("GET", "/", None, "200"),
        ("POST", "/predict?top=3", good, "200"),
        ("POST", "/predict", good[:60], "4"),
        ("GET", "/metrics", None, "200"),
        ("GET", "/nowhere", None, "404"),
    ]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for turn, (method, path, body, expected) in enumerate(itertools.cycle(requests)):
        if time.monotonic() > until:
            break
        try:
            connection.request(method, path, body, {"Content-Type": "image/png"} if body else {})
            answer = connection.getresponse()
            answer.read()
            statuses["as expected" if str(answer.status).startswith(expected) else f"{path}: {answer.status}"] += 1
        except (OSError, http.client.HTTPException) as error:
            # A connection that was idle for long may be closed by the server; a fresh one may not.
            statuses[STALE if time.monotonic() - last > IDLE_SECONDS else f"{path}: {error!r}"] += 1
            connection.close()
        last = time.monotonic()
        if turn % 50 == 0:
            connection.close()
        time.sleep(pause)
    connection.close()


def wait_for_checkpoint(run: Path, worker: Worker) -> None:
    while not list(run.glob("checkpoints/step-*/manifest.json")):
        if worker.process.poll() is not None:
            raise SystemExit("the long training did not start")
        time.sleep(0.2)


def watch(pids: dict[str, int], until: float) -> dict[str, Readings]:
    readings = {name: Readings() for name in pids}
    began = time.monotonic()
    while time.monotonic() < until:
        for name, pid in pids.items():
            try:
                readings[name].add(pid, time.monotonic() - began)
            except (OSError, LookupError):
                raise SystemExit(f"{name}: ended on the way, after {time.monotonic() - began:.0f} s") from None
        time.sleep(min(READING_SECONDS, max(0.0, until - time.monotonic()) + 0.01))
    return readings


def judge(name: str, readings: Readings, most_growth: float) -> list[str]:
    """One line of the table; what does not hold."""
    if len(readings.seconds) < FEWEST_READINGS:
        return [f"{name}: only {len(readings.seconds)} readings; give more --minutes"]
    files, threads = readings.quarters(readings.files), readings.quarters(readings.threads)
    print(
        f"{name:6} {len(readings.seconds):8} {float(np.median(readings.megabytes)):9.1f} {readings.slope:+12.2f} "
        f"{readings.growth:+9.2%} {files[0]:7} -> {files[1]:<4} {threads[0]:6} -> {threads[1]:<4}"
    )
    faults = []
    if readings.growth > most_growth:
        faults.append(f"{name}: memory grew by {readings.growth:.1%}, more than {most_growth:.1%}")
    if files[1] > files[0]:
        faults.append(f"{name}: open files rose from {files[0]} to {files[1]}")
    if threads[1] > threads[0]:
        faults.append(f"{name}: threads rose from {threads[0]} to {threads[1]}")
    return faults


def soak(folder: Path, options: argparse.Namespace) -> list[str]:
    """Run all three for the asked time; what does not hold."""
    run, statuses = folder / "long", Counter[str]()
    long_words = ["-m", "convolve", "train", *LONG, "--threads", "1", "--run-dir", str(run)]
    with ExitStack() as stack:
        long = stack.enter_context(Worker(long_words))
        many = stack.enter_context(Worker([__file__, "--worker", str(folder)]))
        wait_for_checkpoint(run, long)
        served = stack.enter_context(Served(str(run), "--reload", "5", "--threads", "1"))
        until = time.monotonic() + 60 * options.minutes
        background = [
            threading.Thread(target=many.breathe, args=(options.share, until)),
            threading.Thread(target=long.breathe, args=(options.share, until)),
            threading.Thread(target=ask, args=(served.port, options.pause, until, statuses)),
        ]
        for thread in background:
            thread.start()
        readings = watch({"many": many.pid, "long": long.pid, "serve": served.process.pid}, until)
        for thread in background:
            thread.join()
        # The table comes first: whatever goes wrong at the end cannot take it along.
        trainings = int((folder / "trainings").read_text())
        steps = int(max(run.glob("checkpoints/step-*")).name.removeprefix("step-"))
        answered = statuses["as expected"]
        print(f"{options.minutes:g} minutes: {trainings} short trainings, {steps:,} steps of one, {answered:,} answers")
        print("process readings  MiB held   MiB per hour    growth     open files         threads")
        faults = [
            fault for name, found in readings.items() for fault in judge(name, found.settled(), options.most_growth)
        ]
    ends = {"many": many.process.returncode, "long": long.process.returncode, "serve": served.process.returncode}
    asked_to = (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    faults += [f"{name}: ended with {code}" for name, code in ends.items() if code not in asked_to]
    faults += [] if answered > ASKED_LEAST * options.minutes else ["serve: hardly anything was asked"]
    return faults + [f"serve: {what}, {count} times" for what, count in statuses.items() if what not in FINE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--share", type=float, default=0.1, help="part of a core that each training takes [0.1]")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between requests [0.3]")
    parser.add_argument("--most-growth", type=float, default=0.02, help="part by which memory may grow [0.02]")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return train_again_and_again(options.worker)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("soak: stopped before its time"))
    with tempfile.TemporaryDirectory() as folder:
        faults = soak(Path(folder), options)
    print("\n".join(faults) or "all flat")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
