"""Speed of two single-thread replicas and of a two-stage pipeline, relative to one process with two threads.

Layouts alternate for several rounds; the median images/s over rounds counts. Targets: two replicas reach 90 % of one
process on resnet20 and 100 % on LeNet, at the same global batch; two stages with 16 micro batches reach 75 %.

Then two replicas are compared with `DistributedDataParallel` of PyTorch (`plain_ddp.py`), also two processes of one
thread, in turns. Targets: 1.0 on both models with the default transport, which is shared memory on one host, and 0.97
on resnet20 over gloo, as between hosts. LeNet over gloo is reported. Exits with 1 if a target is missed.

    python benchmarks/parallel_speed.py [--rounds 3] [--only layouts|ddp]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from turns import HERE, Rounds, check_ratio, compare, report_row, take_turns

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

# Model of `plain_ddp.py`: options of ours, images of a process, steps of a turn, target over gloo.
DDP = {
    "resnet20": (RESNET, 64, 12, 0.97),
    "lenet": (LENET, 32, 200, None),
}


def measure(options: list[str]) -> float:
    """Return images per second of one run, without its first log interval."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "convolve", "train", *options, *QUIET, "--run-dir", str(Path(folder) / "run")]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["images_per_second"])


def measure_layouts(rounds: int) -> bool:
    """Measure all layouts in turn and return whether all targets are reached."""
    speeds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for number in range(rounds):
        for name, options in LAYOUTS.items():
            speeds[name].append(measure(options))
            print(f"round {number + 1}: {name}: {speeds[name][-1]:,.0f} images/s", flush=True)
    passed = [
        check_ratio(one, other, [mine / theirs for mine, theirs in zip(speeds[one], speeds[other], strict=True)], bar)
        for one, other, bar in BARS
    ]
    return all(passed)


def measure_ddp(model: str, rounds: int) -> bool:
    """Compare two replicas with DDP in turns and return whether the targets are reached."""
    options, batch, steps, target = DDP[model]
    ours = [sys.executable, str(HERE / "our_replicas.py")]
    rest = [str(steps), *options, "--batch-size", str(batch)]
    found = take_turns(
        {
            f"{model}, two replicas": [*ours, "default", *rest],
            f"{model}, two replicas, gloo": [*ours, "gloo", *rest],
            "plain DDP": [sys.executable, str(HERE / "plain_ddp.py"), model, str(batch), str(steps)],
        },
        rounds,
    )
    return _check_ddp(found, f"{model}, two replicas", 1.0) & _check_ddp(found, f"{model}, two replicas, gloo", target)


def _check_ddp(found: Rounds, ours: str, target: float | None) -> bool:
    ratios = compare(found, ours, "plain DDP", "images_per_second")
    if target is not None:
        return check_ratio(ours, "plain DDP", ratios, target)
    report_row(ours, "plain DDP", ratios)
    print(f"{ours} / plain DDP: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
    return True


def main() -> int:
    """Measure layouts and DDP."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each layout, turns of each worker")
    parser.add_argument("--only", choices=("layouts", "ddp"), help="one of the two comparisons")
    options = parser.parse_args()
    passed = options.only == "ddp" or measure_layouts(options.rounds)
    if options.only != "layouts":
        for model in DDP:
            passed &= measure_ddp(model, options.rounds)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
