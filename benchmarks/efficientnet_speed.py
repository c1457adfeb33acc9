"""EfficientNet-B0 at 224 pixels, fp32: images/s compared with timm's model in timm's training loop with its defaults.

    python benchmarks/efficientnet_speed.py [--rounds 5] [--batch-size 16] [--envs FOLDER]

timm is installed on first use into a virtual environment that shares torch with this one. Both train on images in
memory. Target: 1.25 times the speed of timm. Exits with 1 if it is missed.
"""

import argparse
import sys
from pathlib import Path

from convolve.device import cache_folder
from turns import check_ratios, our_command, peer_command, take_turns

PACKAGES = ("timm", "--no-deps")
OURS = [
    *("--model", "efficientnet-b0", "--dataset", "imagenet", "--synthetic-data", "--optimizer", "momentum"),
    *("--weight-decay", "2e-5", "--label-smoothing", "0.1"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", default="16")
    parser.add_argument("--envs", type=Path, default=cache_folder() / "peers")
    options = parser.parse_args()
    batch = options.batch_size
    commands = {
        "convolve": our_command(1, *OURS, "--batch-size", batch),
        "timm": peer_command("timm", PACKAGES, options.envs, batch, "1"),
    }
    return 0 if check_ratios(take_turns(commands, options.rounds), "convolve", {"timm": 1.25}) else 1


if __name__ == "__main__":
    sys.exit(main())
