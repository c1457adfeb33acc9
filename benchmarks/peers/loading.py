"""What the workers of `loader_peers.py` share: the task, and turns of batches from a running loader.

Every loader turns JPEG files into batches of 64 uint8 images of 224 x 224 by a random resized crop (8 to 100 % of the
area, proportions 3:4 to 4:3) and a flip, with two threads or processes.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turns import Turn, process_tree, serve

BATCH, SIZE, WORKERS = 64, 224, 2
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
WARM_UP = 12  # batches that may have been loaded before a turn
PAUSE = 0.5  # seconds in which a loader fills its queues after a turn, before the next loader runs


def find_images(folder: str) -> list[str]:
    return sorted(map(str, (Path(folder) / "train").rglob("*.jpg")))


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    own = os.getpid()
    return time.process_time() + sum(spent for process, spent in process_tree(own).items() if process != own)


def serve_batches(batches: Iterator[Any], count: int) -> None:
    """Run a worker whose turns take `count` batches from an endless loader."""
    first = next(batches)
    if sorted(first.shape) != sorted((BATCH, SIZE, SIZE, 3)) or "uint8" not in str(first.dtype):
        raise SystemExit(f"batches are {first.dtype} {list(first.shape)}")

    def measure() -> Turn:
        for _ in range(WARM_UP):
            next(batches)
        start, spent = time.perf_counter(), cpu_seconds()
        images = sum(len(next(batches)) for _ in range(count))
        took, spent = time.perf_counter() - start, cpu_seconds() - spent
        time.sleep(PAUSE)
        return {"images_per_second": images / took, "images_per_processor_second": images / spent}

    serve(measure)
