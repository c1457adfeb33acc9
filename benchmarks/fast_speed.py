"""`cifar10-fast` compared with the public record whose recipe it follows: CPU time of a whole run.

    python benchmarks/fast_speed.py [--rounds 3]

Both train alternately on images in memory. The CPU time of all steps counts: epochs x 50,000 images / (images per CPU
second). The record takes 8 epochs to its published mean of 94.01 %; the epochs of `cifar10-fast` are in its config, its
accuracy is in docs/results.md. Target: no more CPU time than the record. Exits with 1 if it is missed.
"""

import argparse
import sys
from statistics import median

from convolve.config.loading import resolve
from turns import HERE, check_ratio, compare, our_command, take_turns

CONFIG, IMAGES, EPOCHS_OF_RECORD = "cifar10-fast", 50_000, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ours = resolve(CONFIG).config.optim.epochs
    assert ours is not None, "the config sets the number of epochs"
    epochs = {"convolve": ours, "record": EPOCHS_OF_RECORD}
    found = take_turns(
        {
            "convolve": our_command(1, "--config", CONFIG, "--synthetic-data"),
            "record": [sys.executable, str(HERE / "record.py"), "1"],
        },
        options.rounds,
    )
    for name, turns in found.items():
        rate = median(turn["images_per_processor_second"] for turn in turns)
        print(f"{name}: {epochs[name]:g} epochs take {epochs[name] * IMAGES / rate / 60:.1f} CPU minutes")
    speeds = compare(found, "convolve", "record", "images_per_processor_second")
    ratios = [speed * EPOCHS_OF_RECORD / ours for speed in speeds]
    return 0 if check_ratio("CPU time per run", "record of cifar10", ratios, 1.0) else 1


if __name__ == "__main__":
    sys.exit(main())
