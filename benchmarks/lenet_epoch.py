"""Seconds per MNIST epoch of `lenet-bn`: convolve against the usual PyTorch loop with a DataLoader, interleaved.

    python benchmarks/lenet_epoch.py [--rounds 3] [--floor 1.3]

Both train the same network with batch 64 and Adam 1e-3 on all 60,000 images. Prints the best epoch of each and the
ratio; exits with 1 if it is below the floor.
"""

import argparse
import json
import subprocess
import sys
import time

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from convolve.config import DataConfig
from convolve.data.dataset import ignore_progress
from convolve.data.lookup import open_dataset

BATCH = 64


class Digits(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.split = open_dataset(DataConfig(dataset="mnist"), announce=print, progress=ignore_progress).train

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray(self.split.images[index, :, :, 0])
        pixels = torch.from_numpy(np.array(image))[None].float().div(255)
        return pixels.sub_(0.5).div_(0.5), int(self.split.labels[index])


def usual_epoch(digits: Digits) -> float:
    """Seconds of one epoch after a short warm-up."""
    first, second = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
    pool, relu = nn.MaxPool2d(2), nn.ReLU()
    net = nn.Sequential(first, relu, pool, nn.BatchNorm2d(20), second, relu, pool, nn.Flatten(), nn.Linear(800, 10))
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    loader = torch.utils.data.DataLoader(digits, batch_size=BATCH, shuffle=True)
    began, done = time.perf_counter(), 0
    for step, (images, labels) in enumerate(loader):
        if step == 20:
            began, done = time.perf_counter(), 0
        optimiser.zero_grad()
        functional.cross_entropy(net(images), labels).backward()
        optimiser.step()
        done += len(labels)
    return (time.perf_counter() - began) * len(digits) / done


def our_epoch() -> float:
    words = [sys.executable, "-m", "convolve", "train", "--config", "lenet-bn-mnist", "--epochs", "2"]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True)
    rate: float = json.loads(done.stdout.strip().splitlines()[-1])["images_per_second"]
    return 60_000 / rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floor", type=float, default=1.3)
    options = parser.parse_args()
    digits, ours, usual = Digits(), [], []
    for turn in range(options.rounds):
        ours.append(our_epoch())
        usual.append(usual_epoch(digits))
        print(f"round {turn}: convolve {ours[-1]:.2f} s, usual loop {usual[-1]:.2f} s per epoch", flush=True)
    ratio = min(usual) / min(ours)
    print(f"convolve is {ratio:.2f} times as fast as the usual loop (floor {options.floor})")
    sys.exit(1 if ratio < options.floor else 0)


if __name__ == "__main__":
    main()
