"""Time from process start to the printed accuracy: `convolve train PHOTOS --epochs 0` and the plain script, in turns.

    python benchmarks/photo_speed.py PHOTOS WEIGHTS.pth [ROUNDS]

Every round runs the plain script, convolve without data checks, and convolve with them. Cached features and checks are
removed before each; the weights of convolve must be in the cache. Prints the times and accuracies, their medians, and
the ratios of the medians; exits with 1 if a ratio is above its limit. The machine must be idle.
"""

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from convolve.data.scan import scans_folder
from convolve.transfer.cache import features_folder

LIMITS = {"without checks": 0.6, "with checks": 1.0}
BASELINE = Path(__file__).with_name("photo_baseline.py")


def run(command: list[str], folder: str) -> tuple[float, float]:
    """Run a command; return the seconds until it printed its accuracy, and the accuracy in percent."""
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "piped"
        for line in process.stdout:
            if match := re.match(r"accuracy ([\d.]+)(%?)", line):
                return time.perf_counter() - started, float(match[1]) * (1 if match[2] else 100)
    raise SystemExit(f"{' '.join(command)}: printed no accuracy; run it alone")


def main(photos: Path, weights: Path, rounds: int = 5) -> int:
    """Print the figures of each round, and the medians; return 1 if a limit is missed."""
    train = [sys.executable, "-m", "convolve", "train", str(photos), "--epochs", "0"]
    variants = {
        "plain": [sys.executable, str(BASELINE), str(photos), str(weights)],
        "without checks": [*train, "--no-check-data"],
        "with checks": train,
    }
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name, command in variants.items():
                for cached in (features_folder(), scans_folder()):
                    shutil.rmtree(cached, ignore_errors=True)
                seconds, accuracy = run(command, folder)
                figures[name].append((seconds, accuracy))
                print(f"round {number + 1}, {name}: {seconds:.1f} s, {accuracy:.1f}%", flush=True)
    medians = {name: statistics.median(seconds for seconds, _ in rows) for name, rows in figures.items()}
    missed = False
    for name, limit in LIMITS.items():
        ratio = medians[name] / medians["plain"]
        missed = missed or ratio > limit
        times = f"{medians[name]:.1f} s, plain {medians['plain']:.1f} s"
        print(f"{name}: median {times}, ratio {ratio:.2f} (at most {limit})")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute(), *map(int, sys.argv[3:])))
