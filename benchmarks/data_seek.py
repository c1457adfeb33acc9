"""Large data sets in tar files and TFRecords: time to build the index, and time to the first batch of a resumed run.

    python benchmarks/data_seek.py [--samples 200000] [--shards 100]

Tiny synthetic images are written as WebDataset tars and as ImageNet TFRecords. For each format:

    index    first opening: seconds per million images
    open     every later opening, with a cached index: part of each start and resume
    seek     from a position (start, middle and last batch of an epoch, middle of the 90th epoch) to the first batch of
             pixels, with a new loader

Exits with 1 if a later opening and a seek together take a second or more at any position.
"""

import argparse
import io
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from convolve import device

device.prepare()
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from convolve.config.schema import DataConfig  # noqa: E402
from convolve.data.build import fit_normalization, open_train_loader  # noqa: E402
from convolve.data.dataset import Dataset, Reader  # noqa: E402
from convolve.data.readers.detect import open_images  # noqa: E402
from convolve.download import ignore_progress  # noqa: E402
from record_files import Sample, write_imagenet  # noqa: E402

BATCH, CLASSES, LIMIT_SECONDS = 16, 10, 1.0


def make_samples(count: int) -> list[Sample]:
    """Return samples with few different images; only positions matter here."""
    rng = np.random.default_rng(0)
    images = []
    for _ in range(CLASSES):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(buffer, "JPEG")
        images.append(buffer.getvalue())
    return [(images[number % CLASSES], number % CLASSES) for number in range(count)]


def write_tars(root: Path, train: list[Sample], test: list[Sample], shards: int) -> None:
    root.mkdir()
    for split, samples, parts in (("train", train, shards), ("validation", test, 1)):
        for shard in range(parts):
            with tarfile.open(root / f"{split}-{shard:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
                for row in range(shard * len(samples) // parts, (shard + 1) * len(samples) // parts):
                    for ending, content in (("jpg", samples[row][0]), ("cls", str(samples[row][1]).encode())):
                        member = tarfile.TarInfo(f"{row:09d}.{ending}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))


def open_timed(root: Path) -> tuple[Dataset[Reader], float]:
    start = time.perf_counter()
    dataset = open_images(root, str(root), ignore_progress)
    assert dataset is not None
    return dataset, time.perf_counter() - start


def seek(dataset: Dataset[Reader], position: int) -> float:
    """Return the seconds to the first batch from a position, with a new loader."""
    config = DataConfig(image_size=16, workers=2)
    start = time.perf_counter()
    loader = open_train_loader(dataset.train, fit_normalization(dataset.train, config), torch.device("cpu"), config)
    batch = next(loader.step_batches(0, position, BATCH, BATCH))
    assert batch.global_samples == min(BATCH, len(dataset.train) - position % len(dataset.train))
    return time.perf_counter() - start


def measure(kind: str, root: Path, count: int) -> bool:
    """Print the times of one format and return whether they are within the limit."""
    _, indexing = open_timed(root)
    dataset, opening = open_timed(root)
    positions = {"start": 0, "middle": count // 2, "last batch": count - 3, "epoch 90": 89 * count + count // 2}
    seek(dataset, 0)
    seeks = {name: seek(dataset, position) for name, position in positions.items()}
    print(f"{kind:<10} index {indexing:6.2f} s ({indexing / count * 1e6:.0f} s per million)   open {opening:.3f} s")
    for name, seconds in seeks.items():
        print(f"{'':<10} seek to {name:<12} {seconds:.3f} s")
    worst = opening + max(seeks.values())
    print(
        f"{'':<10} open and seek {worst:.3f} s (under {LIMIT_SECONDS:g}) {'ok' if worst < LIMIT_SECONDS else 'MISSED'}"
    )
    return worst < LIMIT_SECONDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--shards", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = make_samples(options.samples), make_samples(10)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["CONVOLVE_CACHE"] = f"{scratch}/cache"
        write_tars(Path(scratch, "tar"), train, test, options.shards)
        write_imagenet(Path(scratch, "tfrecord"), train, test, options.shards)
        passed = [measure(kind, Path(scratch, kind), options.samples) for kind in ("tar", "tfrecord")]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
