"""Benchmark worker: DALI's CPU pipeline, which decodes only the crop, on two threads.

dali_loader.py FOLDER BATCHES
"""

import sys
from collections.abc import Iterator
from typing import Any

from nvidia.dali import fn, pipeline_def, types

from peers.loading import AREA, ASPECT, BATCH, SIZE, WORKERS, serve_batches


@pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None)  # type: ignore[untyped-decorator]
def describe(folder: str) -> Any:
    files, _ = fn.readers.file(file_root=f"{folder}/train", random_shuffle=True)
    images = fn.decoders.image_random_crop(files, device="cpu", random_area=AREA, random_aspect_ratio=ASPECT)
    images = fn.resize(images, size=(SIZE, SIZE), interp_type=types.INTERP_LINEAR)
    return fn.flip(images, horizontal=fn.random.coin_flip())


def load(folder: str) -> Iterator[Any]:
    pipeline = describe(folder)
    pipeline.build()
    while True:
        yield pipeline.run()[0].as_array()


if __name__ == "__main__":
    serve_batches(load(sys.argv[1]), int(sys.argv[2]))
