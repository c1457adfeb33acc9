"""How soon `convolve` answers: help, the list of configs, a mistake in an option, a described network, the first step.

    python benchmarks/start_up.py [--rounds 5]

The commands take turns; the best of the rounds counts, since others may use the machine. The bar: `convolve --help`
under half a second. Ends with status 1 where it is missed.
"""

import argparse
import subprocess
import sys
import tempfile
import time

from turns import within

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
        place = ["--run-dir", f"{folder}/run"] if "--iterations" in arguments else []
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "convolve", *arguments, *place], capture_output=True, check=False)
        return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            seconds[name].append(measure(arguments))
    for name, found in seconds.items():
        print(f"{name:<28} {min(found):5.2f} s")
    return 0 if within("convolve --help", min(seconds["convolve --help"]), LIMIT, "s") else 1


if __name__ == "__main__":
    sys.exit(main())
