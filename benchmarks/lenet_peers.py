"""LeNet (`lenet-bn`, batch 64, Adam, fp32) on MNIST: whole epochs, compared with Keras, JAX, Paddle and PyTorch.

    python benchmarks/lenet_peers.py [--rounds 3] [--steps 937] [--peers keras jax paddle torch] [--data-dir FOLDER]
        [--envs FOLDER]

The model: 20 convolutions of 5x5, ReLU, max-pool, batch norm, 50 of 5x5, ReLU, max-pool, dense. Every framework is used
as in its documentation, with the data in memory, and all but PyTorch in separate virtual environments, created on first
use. Target: 1.6 times the fastest of them. Exits with 1 if it is missed.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from convolve.config import DataConfig
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.lookup import open_dataset
from convolve.device import cache_folder
from convolve.download import ignore_progress
from turns import check_ratios, compare, our_command, peer_command, report_row, take_turns

PACKAGES: dict[str, tuple[str, ...]] = {
    "keras": ("tensorflow-cpu",),
    "jax": ("jax", "flax", "optax"),
    "paddle": ("paddlepaddle",),
    "torch": (),
}
EPOCH = 60_000 // 64
TARGET = 1.6


def save_digits(data_dir: Path | None, file: Path) -> None:
    """Write MNIST to a file that all frameworks can read."""
    config = DataConfig(dataset="mnist", data_dir=data_dir)
    digits = open_dataset(config, announce=print, progress=ignore_progress)
    train, test = digits.train, digits.test
    assert isinstance(train, InMemoryImages) and isinstance(test, InMemoryImages), "MNIST is kept in memory"
    labels, test_labels = (split.labels.astype(np.uint8) for split in (train, test))
    images, test_images = (split.images[..., 0] for split in (train, test))
    np.savez(file, images=images, labels=labels, test_images=test_images, test_labels=test_labels)


def our_options(data_dir: Path | None) -> list[str]:
    options = [] if data_dir is None else ["--data-dir", str(data_dir)]
    return ["--config", "lenet-bn-mnist", "--batch-size", "64", *options]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=EPOCH, help="steps per measurement [937, an epoch]")
    parser.add_argument("--peers", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST [as `convolve train` finds it]")
    parser.add_argument("--envs", type=Path, default=cache_folder() / "peers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        digits = Path(scratch) / "mnist.npz"
        save_digits(options.data_dir, digits)
        peers = {
            name: peer_command(name, PACKAGES[name], options.envs, str(digits), str(options.steps))
            for name in options.peers
        }
        found = take_turns(
            {"convolve": our_command(options.steps, *our_options(options.data_dir)), **peers}, options.rounds
        )
    rates = {name: median(turn["images_per_second"] for turn in found[name]) for name in found}
    for name, rate in sorted(rates.items(), key=lambda one: -one[1]):
        print(f"{name:<10} {rate:>9,.0f} images/s   {60_000 / rate:6.2f} s per epoch")
    fastest = max(options.peers, key=rates.__getitem__)
    for name in options.peers:
        if name != fastest:
            report_row("images/s", name, compare(found, "convolve", name, "images_per_second"))
    return 0 if check_ratios(found, "convolve", {fastest: TARGET}) else 1


if __name__ == "__main__":
    sys.exit(main())
