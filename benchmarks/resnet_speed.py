"""Images/s of ResNet-20 on CIFAR images (batch 128) and ResNet-50 at 224 pixels (batch 16) in fp32, and PyTorch loops.

    python benchmarks/resnet_speed.py [--rounds 5] [--only resnet20|resnet50] [--compiled]

All train on images in memory (`--synthetic-data`). Targets: 1.25 times the plain loop (NCHW, eager), and at least the
loop tuned by hand (channels-last, fused SGD, an allocator that keeps freed memory). Also prints the fraction of the
rate of matrix products, measured in the same process between the runs; the goal for ResNet-50 is 60 %, which is not
enforced. `--compiled` also measures the tuned loop with `torch.compile`, without a target. Exits with 1 if a target is
missed.
"""

import argparse
import sys
from statistics import median

from turns import Rounds, check_ratios, compare, loop_command, our_command, take_turns

OURS = {
    "resnet20": ("--config", "resnet20-cifar10"),
    "resnet50": ("--model", "resnet50", "--dataset", "imagenet", "--optimizer", "momentum"),
}
BATCHES, STEPS = {"resnet20": 128, "resnet50": 16}, {"resnet20": 4, "resnet50": 1}
GOAL = 0.6


def flop_fraction(turns: Rounds, name: str) -> float:
    """Return the median rate of operations relative to the best rate of matrix products."""
    matmul = max(float(one["matmul_flops"]) for one in turns[name])
    return median(6 * float(one["multiply_adds"] * one["images_per_second"]) for one in turns[name]) / matmul


def measure(model: str, rounds: int, compiled: bool) -> bool:
    batch, steps = BATCHES[model], STEPS[model]
    print(f"{model}, batch {batch}:", flush=True)
    commands = {
        "convolve": our_command(steps, *OURS[model], "--batch-size", str(batch), "--synthetic-data"),
        "plain PyTorch loop": loop_command("plain", model, batch, steps),
        "tuned PyTorch loop": loop_command("tuned", model, batch, steps),
    }
    if compiled:
        commands["compiled PyTorch loop"] = loop_command("compiled", model, batch, steps)
    found = take_turns(commands, rounds)
    fraction = flop_fraction(found, "convolve")
    print(f"fraction of the rate of matrix products: {fraction:.1%} (goal for ResNet-50 {GOAL:.0%})")
    if compiled:
        ratio = median(compare(found, "tuned PyTorch loop", "compiled PyTorch loop", "images_per_second"))
        print(f"tuned PyTorch loop / compiled PyTorch loop: {ratio:.2f}")
    return check_ratios(found, "convolve", {"plain PyTorch loop": 1.25, "tuned PyTorch loop": 1.0})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=OURS, nargs="+", default=list(OURS))
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    return 0 if all([measure(model, options.rounds, options.compiled) for model in options.only]) else 1


if __name__ == "__main__":
    sys.exit(main())
