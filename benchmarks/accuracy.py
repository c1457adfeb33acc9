"""Train the documented configs and compare their test accuracy with the minimum in docs/results.md.

    python benchmarks/accuracy.py [NAME ...] [--seeds 0 1 2] [--data-dir FOLDER]

By default, runs the configs that take minutes. Prints a line per run. Exits with 1 if an accuracy is below its minimum.
"""

import argparse
import json
import subprocess
import sys

MINUTES = {
    "lenet-mnist": 0.990,
    "lenet-bn-mnist": 0.985,
    "lenet-sigmoid-mnist": 0.975,
    "cnn-wide-mnist": 0.965,
}
HOURS = {
    "resnet20-cifar10": 0.83,
    "resnet20-cifar10-cosine": 0.90,
    "resnet8-cifar10-test": 0.75,
    "cifar10-fast": 0.937,
}
MIN_ACCURACY = MINUTES | HOURS


def train(config: str, seed: int, data_dir: str | None) -> dict[str, float]:
    words = [sys.executable, "-m", "convolve", "train", "--config", config, "--seed", str(seed), "--json"]
    words += ["--data-dir", data_dir] if data_dir else []
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    report: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"config: {', '.join(MIN_ACCURACY)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder with the data; by default they are fetched")
    options = parser.parse_args()
    if unknown := set(options.names) - set(MIN_ACCURACY):
        parser.error(f"{', '.join(sorted(unknown))}: unknown name; known: {', '.join(MIN_ACCURACY)}")
    failures = 0
    for name in options.names or MINUTES:
        for seed in options.seeds:
            report = train(name, seed, options.data_dir)
            accuracy = report["test_accuracy"]
            failures += accuracy < MIN_ACCURACY[name]
            print(
                f"{name} seed {seed}: {accuracy:.2%} of {report['test_samples']:,.0f} images "
                f"(minimum {MIN_ACCURACY[name]:.1%}), {report['seconds']:.0f} s",
                flush=True,
            )
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
