"""Speed of two single-thread replicas and of a two-stage pipeline, relative to one process with two threads.

Layouts alternate for several rounds; the median images/s over rounds counts. Targets: two replicas reach 90 % of one
process on resnet20 and 100 % on LeNet, at the same global batch; two stages with 16 micro batches reach 75 %. Exits
with 1 if a target is missed.

    python benchmarks/parallel_speed.py [--rounds 3]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from turns import check_ratio

RESNET = ["--config", "resnet20-cifar10", "--generated-data", "--iterations", "12"]
LENET = ["--config", "lenet-mnist", "--generated-data", "--iterations", "200"]
QUIET = ["--validation-mode", "none", "--no-checkpoints", "--no-report", "--no-curves", "--json"]
SIXTEEN = ["--batch-size", "16", "--gradient-accumulation-count", "16", "--iterations", "6"]
LAYOUTS = {
    "resnet20, one process": [*RESNET, "--batch-size", "128", "--threads", "2"],
    "resnet20, two replicas": [*RESNET, "--batch-size", "64", "--replicas", "2", "--threads", "1"],
    "lenet, one process": [*LENET, "--batch-size", "64", "--threads", "2"],
    "lenet, two replicas": [*LENET, "--batch-size", "32", "--replicas", "2", "--threads", "1"],
    "resnet20, one process, 16 micro batches": [*RESNET, *SIXTEEN, "--threads", "2"],
    "resnet20, two stages, 16 micro batches": [*RESNET, *SIXTEEN, "--shards", "2", "--threads", "1"],
}
BARS = [
    ("resnet20, two replicas", "resnet20, one process", 0.9),
    ("lenet, two replicas", "lenet, one process", 1.0),
    ("resnet20, two stages, 16 micro batches", "resnet20, one process, 16 micro batches", 0.75),
]


def measure(options: list[str]) -> float:
    """Return images per second of one run, without its first log interval."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "convolve", "train", *options, *QUIET, "--run-dir", str(Path(folder) / "run")]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["images_per_second"])


def main() -> int:
    """Measure all layouts in turn and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each layout")
    rounds = parser.parse_args().rounds
    speeds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for number in range(rounds):
        for name, options in LAYOUTS.items():
            speeds[name].append(measure(options))
            print(f"round {number + 1}: {name}: {speeds[name][-1]:,.0f} images/s", flush=True)
    passed = [
        check_ratio(one, other, [mine / theirs for mine, theirs in zip(speeds[one], speeds[other], strict=True)], bar)
        for one, other, bar in BARS
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
