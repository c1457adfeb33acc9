"""Speed of decoding photographs: the loader, a Pillow DataLoader, simplejpeg alone, and the loader on a raw store.

    python benchmarks/data_decode.py FOLDER     a folder with train/ and val/ of JPEG images

All variants turn the same training images into uint8 batches of 224 x 224 by a random resized crop and a flip, on two
threads or two processes. They alternate, and the median over rounds counts, so load from other processes affects all
alike. Exits with 1 if a ratio is below its target:

    loader from JPEG / Pillow DataLoader      2.5
    loader from JPEG / simplejpeg alone       1.0
    loader from raw store / Pillow DataLoader 5

"loader with its cache" is the default in training: decoded images stay in memory after the first epoch, as far as they
fit. It has no target, since it does not decode.
"""

import argparse
import io
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from convolve import device

device.prepare()

import numpy as np  # noqa: E402
import simplejpeg  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from convolve.config.schema import DataConfig  # noqa: E402
from convolve.data.build import build_augment, decoding_options, fit_normalization  # noqa: E402
from convolve.data.dataset import Dataset  # noqa: E402
from convolve.data.loader.decoding import EncodedImages  # noqa: E402
from convolve.data.prepare import PrepareOptions, prepare  # noqa: E402
from convolve.data.readers.detect import open_images  # noqa: E402
from convolve.download import ignore_progress  # noqa: E402
from convolve.rng import SampleRNG, epoch_permutation  # noqa: E402
from turns import check_ratio  # noqa: E402

WORKERS, BATCH, SIZE = 2, 64, 224


class PillowFolder(torch.utils.data.Dataset[torch.Tensor]):
    """Data set of a typical training script: open, convert, random crop, resize, flip, to tensor."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(io.BytesIO(self.paths[index].read_bytes())) as file:
            image = file.convert("RGB")
        width, height = image.size
        for _ in range(10):
            area = random.uniform(0.08, 1) * width * height
            proportion = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * proportion)), round(math.sqrt(area / proportion))
            if 0 < w <= width and 0 < h <= height:
                break
        else:
            w = h = min(width, height)
        left, top = random.randint(0, width - w), random.randint(0, height - h)
        image = image.crop((left, top, left + w, top + h)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def run_pillow(paths: list[Path]) -> Callable[[], int]:
    loader = torch.utils.data.DataLoader(
        PillowFolder(paths), BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )
    return lambda: sum(len(batch) for batch in loader)


def run_simplejpeg(paths: list[Path]) -> Callable[[], int]:
    pool = ThreadPoolExecutor(WORKERS)

    def work(chunk: list[Path]) -> int:
        return sum(simplejpeg.decode_jpeg(path.read_bytes(), colorspace="RGB") is not None for path in chunk)

    chunks = [paths[start : start + 8] for start in range(0, len(paths), 8)]
    return lambda: sum(pool.map(work, chunks))


def run_loader(dataset: Dataset[EncodedImages], *, cached: bool = False) -> Callable[[], int]:
    """Return a function that loads an epoch of uint8 batches; normalization is not part of the comparison."""
    config = DataConfig(workers=WORKERS, dataset_cache=cached, image_size=SIZE)
    reader = dataset.train
    transform, augment = fit_normalization(reader, config), build_augment(config, reader)
    fetcher = reader.fetcher(transform, augment, torch.device("cpu"), decoding_options(config, len(reader)))
    epochs = iter(range(1000))

    def run() -> int:
        epoch = next(epochs)
        order = epoch_permutation(0, epoch, len(reader))
        pending, done = [], 0
        for start in range(0, len(order), BATCH):
            pending.append(fetcher.start(order[start : start + BATCH], SampleRNG(0, epoch)))
            if len(pending) > fetcher.ahead:
                done += len(pending.pop(0)()[0])
        return done + sum(len(fetch()[0]) for fetch in pending)

    return run


def measure(variants: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Return images per second of each variant in each round after an uncounted first one."""
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            count = run()
            if number:
                speeds[name].append(count / (time.perf_counter() - start))
    return speeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = open_images(options.folder, str(options.folder), ignore_progress)
    if folders is None:
        print(f"{options.folder}: no images found")
        return 2
    paths = sorted((options.folder / "train").rglob("*.*"))
    with tempfile.TemporaryDirectory() as scratch:
        raw_folder = Path(scratch) / "raw"
        prepare(folders, raw_folder, PrepareOptions("raw", size=SIZE), WORKERS, ignore_progress)
        store = open_images(raw_folder, str(raw_folder), ignore_progress)
        assert store is not None
        variants = {
            "Pillow DataLoader": run_pillow(paths),
            "simplejpeg alone": run_simplejpeg(paths),
            "loader from JPEG": run_loader(folders),
            "loader from raw store": run_loader(store),
            "loader with its cache": run_loader(folders, cached=True),
        }
        speeds = measure(variants, options.rounds)
    for name, values in speeds.items():
        print(f"{name:<24} {statistics.median(values):8,.0f} images/s")
    targets = (
        ("loader from JPEG", "Pillow DataLoader", 2.5),
        ("loader from JPEG", "simplejpeg alone", 1.0),
        ("loader from raw store", "Pillow DataLoader", 5.0),
    )
    passed = [check_ratio(one, other, compare_rates(speeds, one, other), target) for one, other, target in targets]
    return 0 if all(passed) else 1


def compare_rates(speeds: dict[str, list[float]], one: str, other: str) -> list[float]:
    """Return the ratio of each round."""
    return [mine / theirs for mine, theirs in zip(speeds[one], speeds[other], strict=True)]


if __name__ == "__main__":
    sys.exit(main())
