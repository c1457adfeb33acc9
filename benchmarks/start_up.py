"""Start-up time of `convolve`: help, list of configs, mistyped option, description of a model, first training step.

    python benchmarks/start_up.py [--rounds 5]

The commands alternate; the minimum over rounds counts, which excludes load from other processes. Limit: half a second
for `convolve --help`. Exits with 1 if it is exceeded.
"""

import argparse
import subprocess
import sys
import tempfile
import time

from turns import check_limit

LIMIT = 0.5
LENET = ("--config", "lenet-digits", "--iterations", "1", "--no-report", "--no-curves", "--validation-mode", "none")
COMMANDS = {
    "convolve --help": ["--help"],
    "convolve configs": ["configs"],
    "a mistyped option": ["train", "--epoch-count", "3"],
    "convolve describe lenet-bn": ["describe", "lenet-bn"],
    "one step of lenet-digits": ["train", *LENET],
}


def measure(arguments: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = ["--run-dir", f"{folder}/run"] if "--iterations" in arguments else []
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "convolve", *arguments, *run_dir], capture_output=True, check=False)
        return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            seconds[name].append(measure(arguments))
    for name, times in seconds.items():
        print(f"{name:<28} {min(times):5.2f} s")
    return 0 if check_limit("convolve --help", min(seconds["convolve --help"]), LIMIT, "s") else 1


if __name__ == "__main__":
    sys.exit(main())
