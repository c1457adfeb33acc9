"""Epochs of `lenet-bn` on MNIST (batch 64, Adam): convolve beside the usual PyTorch loop with a DataLoader.

    python benchmarks/lenet_epoch.py [--rounds 3] [--floor 1.6] [--data-dir FOLDER]

The quick form of lenet_peers.py: nothing has to be installed. Ends with status 1 where the ratio is below the floor.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from lenet_peers import EPOCH, our_options, save_digits
from turns import HERE, hold, our_command, take_turns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floor", type=float, default=1.6)
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST; unset: as `convolve train` finds it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        digits = Path(scratch) / "mnist.npz"
        save_digits(options.data_dir, digits)
        commands = {
            "convolve": our_command(EPOCH, *our_options(options.data_dir)),
            "usual PyTorch loop": [sys.executable, str(HERE / "peers" / "torch_peer.py"), str(digits), str(EPOCH)],
        }
        found = take_turns(commands, options.rounds)
    return 0 if hold(found, "convolve", {"usual PyTorch loop": options.floor}) else 1


if __name__ == "__main__":
    sys.exit(main())
