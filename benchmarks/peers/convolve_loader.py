"""Benchmark worker: the loader of convolve, without its cache of decoded images.

convolve_loader.py FOLDER BATCHES
"""

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from convolve import device

device.prepare()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from convolve.config.schema import DataConfig  # noqa: E402
from convolve.data.build import build_augment, decoding_options, fit_normalization  # noqa: E402
from convolve.data.readers.detect import open_images  # noqa: E402
from convolve.download import ignore_progress  # noqa: E402
from convolve.rng import SampleRNG, epoch_permutation  # noqa: E402
from peers.loading import BATCH, SIZE, WORKERS, serve_batches  # noqa: E402


def load(folder: str) -> Iterator[Tensor]:
    """Yield uint8 batches without end; normalization is not part of the comparison."""
    dataset = open_images(Path(folder), folder, ignore_progress)
    assert dataset is not None, folder
    reader, config = dataset.train, DataConfig(workers=WORKERS, dataset_cache=False, image_size=SIZE)
    transform, augment = fit_normalization(reader, config), build_augment(config, reader)
    fetcher = reader.fetcher(transform, augment, torch.device("cpu"), decoding_options(config, len(reader)))
    pending = []
    for epoch in count():
        order = epoch_permutation(0, epoch, len(reader))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            pending.append(fetcher.start(order[start : start + BATCH], SampleRNG(0, epoch)))
            if len(pending) > fetcher.ahead:
                yield pending.pop(0)()[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve_batches(load(sys.argv[1]), int(sys.argv[2]))
