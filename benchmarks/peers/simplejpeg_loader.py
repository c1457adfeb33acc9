"""Benchmark worker: simplejpeg alone on two threads decodes whole images; the batches are never assembled.

simplejpeg_loader.py FOLDER BATCHES
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import simplejpeg

from peers.loading import BATCH, SIZE, WORKERS, find_images, serve_batches

CHUNK = 8


def decode(paths: list[str]) -> None:
    for path in paths:
        simplejpeg.decode_jpeg(Path(path).read_bytes(), colorspace="RGB")


def load(folder: str) -> Iterator[npt.NDArray[np.uint8]]:
    pool, paths = ThreadPoolExecutor(WORKERS), cycle(find_images(folder))
    batch, pending = np.zeros((BATCH, SIZE, SIZE, 3), np.uint8), []
    while True:
        pending.append([pool.submit(decode, list(islice(paths, CHUNK))) for _ in range(BATCH // CHUNK)])
        if len(pending) > 2:
            for future in pending.pop(0):
                future.result()
            yield batch


if __name__ == "__main__":
    serve_batches(load(sys.argv[1]), int(sys.argv[2]))
