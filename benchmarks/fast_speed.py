"""`cifar10-fast` beside the public record whose recipe it follows: processor time of a whole training.

    python benchmarks/fast_speed.py [--rounds 3]

Both step in turns on images that lie in memory. What counts is the time of all steps of a training: epochs x 50,000
images / (images for each second of the processors). The record makes 8 epochs to its published mean of 94.01 %;
`cifar10-fast` makes as many as its config says, and what it reaches is in docs/results.md. The bar: no more processor
time than the record. Ends with status 1 where it is missed.
"""

import argparse
import sys
from statistics import median

from convolve.config.loading import resolve
from turns import HERE, compare, our_command, take_turns, tell

CONFIG, IMAGES, EPOCHS_OF_RECORD = "cifar10-fast", 50_000, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ours = resolve(CONFIG).config.optim.epochs
    assert ours is not None, "the config says how many epochs it takes"
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
        print(f"{name}: {epochs[name]:g} epochs take {epochs[name] * IMAGES / rate / 60:.1f} minutes of a processor")
    speeds = compare(found, "convolve", "record", "images_per_processor_second")
    ratios = [speed * EPOCHS_OF_RECORD / ours for speed in speeds]
    return 0 if tell("record / convolve", median(ratios), 1.0, spread=(min(ratios), max(ratios))) else 1


if __name__ == "__main__":
    sys.exit(main())
