"""ResNet-20 on CIFAR images (batch 128) and ResNet-50 at 224 pixels (batch 16), fp32: images/s beside PyTorch loops.

    python benchmarks/resnet_speed.py [--rounds 5] [--only resnet20|resnet50] [--compiled]

Ours trains with images that lie in memory (`--synthetic-data`), as the loops do. The bars: 1.25 times the plain loop
(NCHW, eager), and not below the loop tuned by hand (channels-last, fused SGD, an allocator that keeps memory). Also
prints what share of the rate of matrix products, measured in the same process between the turns, ResNet-50 reaches;
its goal is 60 %, which no bar enforces. `--compiled` lets the tuned loop with `torch.compile` play as well, without a
bar. Ends with status 1 where a bar is missed.
"""

import argparse
import sys
from statistics import median

from turns import Rounds, compare, hold, loop_command, our_command, take_turns

OURS = {
    "resnet20": ("--config", "resnet20-cifar10"),
    "resnet50": ("--model", "resnet50", "--dataset", "imagenet", "--optimizer", "momentum"),
}
BATCHES, STEPS = {"resnet20": 128, "resnet50": 16}, {"resnet20": 4, "resnet50": 1}
GOAL = 0.6


def flop_share(turns: Rounds, name: str) -> float:
    """By the median of our turns and the best rate of matrix products between them."""
    matmul = max(float(one["matmul_flops"]) for one in turns[name])
    return median(6 * float(one["multiply_adds"] * one["images_per_second"]) for one in turns[name]) / matmul


def measure(network: str, rounds: int, compiled: bool) -> bool:
    batch, steps = BATCHES[network], STEPS[network]
    print(f"{network}, batch {batch}:", flush=True)
    commands = {
        "convolve": our_command(steps, *OURS[network], "--batch-size", str(batch), "--synthetic-data"),
        "plain PyTorch loop": loop_command("plain", network, batch, steps),
        "tuned PyTorch loop": loop_command("tuned", network, batch, steps),
    }
    if compiled:
        commands["compiled PyTorch loop"] = loop_command("compiled", network, batch, steps)
    found = take_turns(commands, rounds)
    print(f"share of the rate of matrix products: {flop_share(found, 'convolve'):.1%} (goal for ResNet-50 {GOAL:.0%})")
    if compiled:
        ratio = median(compare(found, "tuned PyTorch loop", "compiled PyTorch loop", "images_per_second"))
        print(f"tuned PyTorch loop / compiled PyTorch loop: {ratio:.2f}")
    return hold(found, "convolve", {"plain PyTorch loop": 1.25, "tuned PyTorch loop": 1.0})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=OURS, nargs="+", default=list(OURS))
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    return 0 if all([measure(network, options.rounds, options.compiled) for network in options.only]) else 1


if __name__ == "__main__":
    sys.exit(main())
