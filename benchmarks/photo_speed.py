"""Time from process start to the printed accuracy: `convolve train PHOTOS --epochs 0` and the plain script, in turns.

    python benchmarks/photo_speed.py PHOTOS WEIGHTS.pth [ROUNDS]

Every round runs both once. Cached features are removed before each; the weights of convolve must be in the cache.
Prints the times and accuracies, their medians, and the ratio of the medians.
"""

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from convolve.transfer.cache import features_folder

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


def main(photos: Path, weights: Path, rounds: int = 5) -> None:
    """Print the figures of each round, and the medians."""
    plain, ours = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            seconds, accuracy = run([sys.executable, str(BASELINE), str(photos), str(weights)], folder)
            plain.append(seconds)
            shutil.rmtree(features_folder(), ignore_errors=True)
            command = [sys.executable, "-m", "convolve", "train", str(photos), "--epochs", "0"]
            fast, result = run(command, folder)
            ours.append(fast)
            print(f"round {number + 1}: plain {seconds:.1f} s {accuracy:.1f}%, convolve {fast:.1f} s {result:.1f}%")
    ratio = statistics.median(ours) / statistics.median(plain)
    print(
        f"medians: plain {statistics.median(plain):.1f} s, convolve {statistics.median(ours):.1f} s, ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute(), *map(int, sys.argv[3:]))
