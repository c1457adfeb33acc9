"""Benchmark worker: grain, with Pillow and two worker processes.

grain_loader.py FOLDER BATCHES
"""

import math
import sys

import grain
import numpy as np
import numpy.typing as npt
from PIL import Image

from peers.loading import AREA, ASPECT, BATCH, SIZE, WORKERS, find_images, serve_batches


def draw_box(rng: np.random.Generator, width: int, height: int) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a random crop."""
    for _ in range(10):
        area = rng.uniform(*AREA) * width * height
        proportion = math.exp(rng.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        w, h = round(math.sqrt(area * proportion)), round(math.sqrt(area / proportion))
        if 0 < w <= width and 0 < h <= height:
            break
    else:
        w = h = min(width, height)
    left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
    return left, top, left + w, top + h


def load_image(path: str, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    with Image.open(path) as file:
        image = file.convert("RGB")
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=draw_box(rng, *image.size))
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def main() -> None:
    dataset = grain.MapDataset.source(find_images(sys.argv[1])).shuffle(seed=0).repeat().random_map(load_image, seed=0)
    batches = dataset.batch(BATCH).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    serve_batches(iter(batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=WORKERS))), int(sys.argv[2]))


if __name__ == "__main__":
    main()
