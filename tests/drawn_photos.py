"""Photographs drawn by rule: each class has its colors and shapes, each number its own arrangement."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

COLORS = ((200, 60, 50), (50, 150, 70), (60, 80, 190), (210, 170, 40), (150, 60, 160), (40, 160, 170))


def draw_photo(label, number, size=(120, 90)):
    """Return one image of a class: a soft background, and shapes of the class at random places."""
    chance = np.random.default_rng([label, number])
    coarse = chance.integers(40, 216, (3, 4, 3), np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(int(chance.integers(4, 8))):
        x, y = (int(chance.integers(0, side)) for side in size)
        side = int(chance.integers(14, 40))
        color = tuple(int(np.clip(part + chance.integers(-25, 26), 0, 255)) for part in COLORS[label % len(COLORS)])
        box = (x - side // 2, y - side // 2, x + side // 2, y + side // 2)
        (pen.ellipse, pen.rectangle, _triangle(pen))[label % 3](box, fill=color)
    noise = chance.integers(-12, 13, (size[1], size[0], 3))
    pixels = np.clip(np.asarray(image.filter(ImageFilter.GaussianBlur(1)), np.int64) + noise, 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def _triangle(pen):
    return lambda box, fill: pen.polygon(((box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) / 2, box[1])), fill)


def write_photos(root: Path, counts: dict[str, int], suffix=".jpg", first=0):
    """Write `counts[name]` photos of each class into `root/name`; classes are drawn in the order of their names."""
    for label, name in enumerate(sorted(counts)):
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(first, first + counts[name]):
            draw_photo(label, number).save(folder / f"photo {number:03d}{suffix}")
    return root
