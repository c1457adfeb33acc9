"""Soak test: memory, open files and threads of training and serving must stay constant for an hour.

    python benchmarks/soak.py [--minutes 60] [--share 0.1] [--pause 0.3]

Three processes:

    many      one short run after the other in one process, each with validation, curves and report
    long      one long run, with a checkpoint and a validation in each of its short epochs
    serve     a server of the long run, which loads each better checkpoint, under a light mix of good and bad requests

The runs are paused and continued, so each uses about the fraction `--share` of a core. Every few seconds the anonymous
memory (RssAnon), open files and threads of each process are read. The first fifth, in which caches fill, is not
counted. Of the rest:

    slope     median of the slopes between any two readings (Theil-Sen), robust against outliers
    growth    slope x time: less than `--most-growth` of the memory, 2 % by default
    files     minimum in the last quarter no larger than in the first

Prints a table, then the checks that failed. Exits with 1 if any did, or if a process ended early.
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
WARM_UP_FRACTION = 0.2
MIN_READINGS = 12
IDLE_SECONDS = 3.0
MIN_REQUESTS_PER_MINUTE = 20
STALE = "idle connections that the server had closed"
FINE = ("as expected", STALE)
LONG = ["--config", "lenet-digits", "--epochs", "1000000", "--ckpts-per-epoch", "1", "--keep-checkpoints", "3"]
SHORT = {"epochs": 1, "threads": 1, "ckpts_per_epoch": 2}


@dataclass
class Readings:
    """Memory, open files and threads of one process over time."""

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

    def after_warm_up(self) -> "Readings":
        """Return the readings after caches have filled."""
        first = round(len(self.seconds) * WARM_UP_FRACTION)
        return Readings(self.seconds[first:], self.megabytes[first:], self.files[first:], self.threads[first:])

    @property
    def slope(self) -> float:
        """MiB per hour."""
        pairs = itertools.combinations(zip(self.seconds, self.megabytes, strict=True), 2)
        return 3600 * float(np.median([(second[1] - first[1]) / (second[0] - first[0]) for first, second in pairs]))

    @property
    def growth(self) -> float:
        """Growth along the slope, as a fraction of the memory."""
        return self.slope * (self.seconds[-1] - self.seconds[0]) / 3600 / float(np.median(self.megabytes))

    def quarters(self, values: list[int]) -> tuple[int, int]:
        """Return the minimum in the first and in the last quarter, which ignores files that are open briefly."""
        size = max(1, len(values) // 4)
        return min(values[:size]), min(values[-size:])


class Worker:
    """A training process that is paused most of the time."""

    def __init__(self, words: list[str]) -> None:
        self.process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        return self.process.pid

    def throttle(self, fraction: float, until: float) -> None:
        """Run the process for a fraction of each cycle."""
        while time.monotonic() < until and self.process.poll() is None:
            for number, part in ((signal.SIGCONT, fraction), (signal.SIGSTOP, 1 - fraction)):
                self.process.send_signal(number)
                time.sleep(CYCLE_SECONDS * part)
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(120)


def train_repeatedly(folder: Path) -> None:
    """Train short runs until stopped, and count them. This is the process `many`."""
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


def random_image() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def send_requests(port: int, pause: float, until: float, statuses: Counter[str]) -> None:
    """Send images, page requests and invalid requests in turn, sometimes on a new connection."""
    good, last = random_image(), time.monotonic()
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
            response = connection.getresponse()
            response.read()
            statuses["as expected" if str(response.status).startswith(expected) else f"{path}: {response.status}"] += 1
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
            raise SystemExit("the long run did not start")
        time.sleep(0.2)


def watch(pids: dict[str, int], until: float) -> dict[str, Readings]:
    readings = {name: Readings() for name in pids}
    start = time.monotonic()
    while time.monotonic() < until:
        for name, pid in pids.items():
            try:
                readings[name].add(pid, time.monotonic() - start)
            except (OSError, LookupError):
                raise SystemExit(f"{name}: ended early, after {time.monotonic() - start:.0f} s") from None
        time.sleep(min(READING_SECONDS, max(0.0, until - time.monotonic()) + 0.01))
    return readings


def judge(name: str, readings: Readings, most_growth: float) -> list[str]:
    """Print one line of the table and return the failed checks."""
    if len(readings.seconds) < MIN_READINGS:
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
    """Run all three processes for the given time and return the failed checks."""
    run, statuses = folder / "long", Counter[str]()
    long_words = ["-m", "convolve", "train", *LONG, "--threads", "1", "--run-dir", str(run)]
    with ExitStack() as stack:
        long = stack.enter_context(Worker(long_words))
        many = stack.enter_context(Worker([__file__, "--worker", str(folder)]))
        wait_for_checkpoint(run, long)
        served = stack.enter_context(Served(str(run), "--reload", "5", "--threads", "1"))
        until = time.monotonic() + 60 * options.minutes
        background = [
            threading.Thread(target=many.throttle, args=(options.share, until)),
            threading.Thread(target=long.throttle, args=(options.share, until)),
            threading.Thread(target=send_requests, args=(served.port, options.pause, until, statuses)),
        ]
        for thread in background:
            thread.start()
        readings = watch({"many": many.pid, "long": long.pid, "serve": served.process.pid}, until)
        for thread in background:
            thread.join()
        # Print the table first, so an error at the end cannot lose it.
        trainings = int((folder / "trainings").read_text())
        steps = int(max(run.glob("checkpoints/step-*")).name.removeprefix("step-"))
        answered = statuses["as expected"]
        counts = f"{trainings} short runs, {steps:,} steps of the long run, {answered:,} responses"
        print(f"{options.minutes:g} minutes: {counts}")
        print("process readings  MiB        MiB per hour    growth     open files         threads")
        faults = [
            fault
            for name, found in readings.items()
            for fault in judge(name, found.after_warm_up(), options.most_growth)
        ]
    ends = {"many": many.process.returncode, "long": long.process.returncode, "serve": served.process.returncode}
    expected_codes = (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    faults += [f"{name}: ended with {code}" for name, code in ends.items() if code not in expected_codes]
    faults += [] if answered > MIN_REQUESTS_PER_MINUTE * options.minutes else ["serve: too few requests were sent"]
    return faults + [f"serve: {what}, {count} times" for what, count in statuses.items() if what not in FINE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--share", type=float, default=0.1, help="fraction of a core that each run uses [0.1]")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between requests [0.3]")
    parser.add_argument("--most-growth", type=float, default=0.02, help="fraction by which memory may grow [0.02]")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return train_repeatedly(options.worker)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("soak: stopped early"))
    with tempfile.TemporaryDirectory() as folder:
        faults = soak(Path(folder), options)
    print("\n".join(faults) or "all constant")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
