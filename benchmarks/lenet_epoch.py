"""Epochs of `lenet-bn` on MNIST (batch 64, Adam): convolve compared with a typical PyTorch loop with a DataLoader.

    python benchmarks/lenet_epoch.py [--rounds 3] [--floor 1.6] [--data-dir FOLDER]

Quick form of lenet_peers.py that installs nothing. Exits with 1 if the ratio is below --floor.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from lenet_peers import EPOCH, our_options, save_digits
from turns import HERE, check_ratios, our_command, take_turns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floor", type=float, default=1.6)
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST [as `convolve train` finds it]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        digits = Path(scratch) / "mnist.npz"
        save_digits(options.data_dir, digits)
        commands = {
            "convolve": our_command(EPOCH, *our_options(options.data_dir)),
            "typical PyTorch loop": [sys.executable, str(HERE / "peers" / "torch_peer.py"), str(digits), str(EPOCH)],
        }
        found = take_turns(commands, options.rounds)
    return 0 if check_ratios(found, "convolve", {"typical PyTorch loop": options.floor}) else 1


if __name__ == "__main__":
    sys.exit(main())
