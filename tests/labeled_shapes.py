"""Small images with several labels: colored squares, and a table that lists the colors of each image."""

import csv
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

COLORS = ("blue", "green", "red")
SIDE = 16


def draw(labels: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint8]:
    """Return an image [16, 16, 3] with a bright square in the channel of each label, and noise."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 60, (SIDE, SIDE, 3), np.uint8)
    for channel, present in zip((2, 1, 0), labels, strict=True):
        if present:
            top, left = rng.integers(0, SIDE - 6, 2)
            pixels[top : top + 6, left : left + 6, channel] = 230
    return pixels


def make_arrays(count: int, seed: int = 0) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return images [N, 16, 16, 3] and labels [N, 3] of 0 and 1; some images have none."""
    labels = np.random.default_rng(seed).integers(0, 2, (count, len(COLORS)))
    return np.stack([draw(row, seed * 10_000 + number) for number, row in enumerate(labels)]), labels


def write_folder(root: Path, count: int = 90, splits: bool = True) -> Path:
    """Write images and labels.csv; with splits, two thirds train, a sixth validates and a sixth tests."""
    images, labels = make_arrays(count)
    (root / "images").mkdir(parents=True)
    with (root / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        for number, (pixels, row) in enumerate(zip(images, labels, strict=True)):
            name = f"images/{number:03d}.png"
            Image.fromarray(pixels).save(root / name)
            split = ("train", "train", "train", "train", "val", "test")[number % 6]
            names = [COLORS[index] for index in np.flatnonzero(row)]
            writer.writerow([name, *names, *([split] if splits else [])])
    return root
