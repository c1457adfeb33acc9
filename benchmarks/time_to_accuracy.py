"""Seconds from the command to 99.2 % test accuracy on MNIST: convolve and the convnet recipe of keras.io.

    python benchmarks/time_to_accuracy.py [--rounds 1] [--data-dir FOLDER] [--envs FOLDER] [--only convolve|keras]

Everything counts: starting Python, imports, reading data, compiling, training, validating. Each command is stopped as
soon as a validation reaches the goal. Keras validates on a tenth of the training images as in its recipe, and also
computes its test accuracy after every epoch, as convolve does. A command that misses the goal counts with its full
time. Target: five times faster. Exits with 1 if it is missed.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from convolve.device import cache_folder
from lenet_peers import PACKAGES, save_digits
from turns import check_ratio, peer_command

GOAL, TARGET = 0.992, 5.0
OURS = ("--config", "lenet-mnist", "--dataset", "mnist", "--epochs", "6", "--no-report", "--no-curves")
ACCURACY = re.compile(r"accuracy ([\d.]+)(%?)")


def watch(command: list[str]) -> tuple[float, float]:
    """Return the seconds until a printed accuracy reaches the goal, or until the end, and the best accuracy."""
    start, best = time.perf_counter(), 0.0
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if (match := ACCURACY.search(line)) and line.startswith(("validation", "epoch")):
            best = max(best, float(match[1]) / (100 if match[2] else 1))
        if best >= GOAL:
            break
    seconds = time.perf_counter() - start
    process.terminate()
    process.wait(60)
    return seconds, best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST [as `convolve train` finds it]")
    parser.add_argument("--envs", type=Path, default=cache_folder() / "peers")
    parser.add_argument("--only", choices=("convolve", "keras"), nargs="+", default=["convolve", "keras"])
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as scratch:
        digits = Path(scratch) / "mnist.npz"
        save_digits(options.data_dir, digits)
        data_dir = [] if options.data_dir is None else ["--data-dir", str(options.data_dir)]
        python, _ = peer_command("keras", PACKAGES["keras"], options.envs)
        recipe = str(Path(__file__).parent / "peers" / "keras_recipe.py")
        for number in range(options.rounds):
            folder = ["--run-dir", f"{scratch}/run-{number}", "--seed", str(number)]
            commands = {
                "convolve": [sys.executable, "-m", "convolve", "train", *OURS, *data_dir, *folder],
                "keras": [python, recipe, str(digits), str(GOAL)],
            }
            for name in options.only:
                took, best = watch(commands[name])
                seconds[name].append(took)
                print(f"round {number + 1}  {name:<9} {took:7.1f} s, {best:.2%}", flush=True)
                if best < GOAL and name == "convolve":
                    print("convolve did not reach the goal: MISSED")
                    return 1
    if len(seconds) < 2:
        return 0
    ratio = median(seconds["keras"]) / median(seconds["convolve"])
    return 0 if check_ratio("time to 99.2 %", "recipe of keras.io", [ratio], TARGET) else 1


if __name__ == "__main__":
    sys.exit(main())
