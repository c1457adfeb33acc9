"""Benchmark worker: SPDL, which decodes, crops and resizes by FFmpeg on two threads.

spdl_loader.py FOLDER BATCHES
"""

import math
import random
import sys
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import spdl.io
from spdl.pipeline import PipelineBuilder

from peers.loading import AREA, ASPECT, BATCH, SIZE, WORKERS, find_images, serve_batches

WIDTH, HEIGHT = 500, 375  # of the generated images


def draw_filter() -> str:
    """Return the FFmpeg filters of a random crop and flip."""
    for _ in range(10):
        area = random.uniform(*AREA) * WIDTH * HEIGHT
        proportion = math.exp(random.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        w, h = round(math.sqrt(area * proportion)), round(math.sqrt(area / proportion))
        if 0 < w <= WIDTH and 0 < h <= HEIGHT:
            break
    else:
        w = h = min(WIDTH, HEIGHT)
    crop = f"crop={w}:{h}:{random.randint(0, WIDTH - w)}:{random.randint(0, HEIGHT - h)}"
    flip = ",hflip" if random.random() < 0.5 else ""
    return f"{crop},scale={SIZE}:{SIZE}:flags=bilinear{flip},format=rgb24"


def decode(path: str) -> Any:
    return spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=draw_filter())


def join(frames: list[Any]) -> Any:
    return spdl.io.to_numpy(spdl.io.convert_frames(frames))


def load(folder: str) -> Iterator[Any]:
    builder = PipelineBuilder().add_source(cycle(find_images(folder))).pipe(decode, concurrency=WORKERS)
    pipeline = builder.aggregate(BATCH).pipe(join).add_sink(2).build(num_threads=WORKERS)
    with pipeline.auto_stop():
        yield from pipeline


if __name__ == "__main__":
    serve_batches(load(sys.argv[1]), int(sys.argv[2]))
