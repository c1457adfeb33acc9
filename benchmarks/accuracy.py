"""Train the documented configs and compare their test accuracy with what docs/results.md promises.

    python benchmarks/accuracy.py [NAME ...] [--seeds 0 1 2]

Prints a line per run; exits with 1 if any accuracy lies below its floor.
"""

import argparse
import json
import subprocess
import sys

FLOORS = {
    "lenet-mnist": 0.990,
    "lenet-bn-mnist": 0.988,
    "lenet-sigmoid-mnist": 0.975,
    "cnn-wide-mnist": 0.965,
}


def train(config: str, seed: int) -> dict[str, float]:
    words = [sys.executable, "-m", "convolve", "train", "--config", config, "--seed", str(seed), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    report: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(FLOORS), metavar="NAME", help=f"of {', '.join(FLOORS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    short = 0
    for name in options.names:
        for seed in options.seeds:
            report = train(name, seed)
            accuracy = report["test_accuracy"]
            short += accuracy < FLOORS[name]
            print(
                f"{name} seed {seed}: {accuracy:.2%} of {report['test_samples']:,.0f} images "
                f"(floor {FLOORS[name]:.1%}), {report['seconds']:.0f} s",
                flush=True,
            )
    sys.exit(1 if short else 0)


if __name__ == "__main__":
    main()
