"""Accuracy and time of whole runs: `convolve train PHOTOS` for several seeds and time budgets.

    python benchmarks/photo_runs.py PHOTOS [--seeds 0 1 2] [--minutes 1 3 10] [-- OPTIONS OF convolve train]

Without --minutes, the recipe chooses the length. Every run starts a process and has a cold feature cache; the weights
must be in the cache. Times are from process start to the printed accuracy. Prints a line for each run, the mean of the
seeds, and MISSED for a run that ends more than 10 % before or after its budget. The machine must be idle.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from convolve.transfer.cache import features_folder
from photo_speed import run

TOLERANCE = 0.1


def within_budget(seconds: float, minutes: float) -> bool:
    """Return True if a run ends at its budget, within 10 %."""
    return abs(seconds / (60 * minutes) - 1) <= TOLERANCE


def measure(photos: Path, seeds: list[int], minutes: float | None, options: list[str]) -> bool:
    """Print the figures of a run for each seed and their mean; return True if all used their budget."""
    accuracies, kept = list[float](), True
    budget = [] if minutes is None else ["--minutes", f"{minutes:g}"]
    name = "no budget" if minutes is None else f"{minutes:g} min"
    for seed in seeds:
        shutil.rmtree(features_folder(), ignore_errors=True)
        command = [sys.executable, "-m", "convolve", "train", str(photos), "--seed", str(seed), *budget, *options]
        with tempfile.TemporaryDirectory() as folder:
            seconds, accuracy = run(command, folder)
        accuracies.append(accuracy)
        ends = minutes is None or within_budget(seconds, minutes)
        kept = kept and ends
        print(f"{name}, seed {seed}: {seconds:.0f} s, {accuracy:.1f}%" + ("" if ends else " MISSED"), flush=True)
    print(f"{name}: mean {statistics.mean(accuracies):.2f}% of {len(seeds)} seeds", flush=True)
    return kept


def main(arguments: list[str]) -> int:
    """Measure every budget; return 1 if a run missed its budget."""
    own, options = _split(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, nargs="+")
    given = parser.parse_args(own)
    results = [measure(given.photos.absolute(), given.seeds, minutes, options) for minutes in given.minutes or [None]]
    return 0 if all(results) else 1


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
