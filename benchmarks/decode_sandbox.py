"""Decode uploads in the server's sandboxes and in this process, in turns: throughput, and the CPU time it costs.

    python benchmarks/decode_sandbox.py [--rounds 9] [--images 200]

Both decode the same JPEG photos (640 x 480 pixels, noise and gradients) to 224 x 224 pixels with as many workers as the
server has: `DecoderPool`, and threads that call the same function. The target is 0.9 of the throughput without a
sandbox. On a busy machine only the CPU time is comparable; it includes that of the children.
"""

import argparse
import asyncio
import io
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from convolve.inference.decoding import DecodeRequest, decode_inputs, pack_requests
from convolve.inference.preprocess import InputSpec
from convolve.rng import generator
from convolve.serving.decoding import DECODERS, DecoderPool
from turns import check_ratio

TARGET = 0.9
SPEC = InputSpec(height=224, width=224, channels=3, crop_fraction=0.875, fit="photo")


def draw_photo(number: int) -> bytes:
    """Return a JPEG with a gradient and noise."""
    noise = generator(0, "photo", number).integers(0, 40, (480, 640, 3))
    gradient = np.linspace(0, 200, 640)[None, :, None] + np.zeros((480, 1, 3))
    buffer = io.BytesIO()
    Image.fromarray((noise + gradient).astype(np.uint8)).save(buffer, "jpeg", quality=90)
    return buffer.getvalue()


def cpu_seconds(children: list[int]) -> float:
    """Return the CPU time of this process and of running children."""
    ticks = 0
    for child in children:
        with open(f"/proc/{child}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measure(decode: Callable[[], None], children: list[int], images: int) -> tuple[float, float]:
    """Return images per second, and CPU seconds per image."""
    start, before = time.perf_counter(), cpu_seconds(children)
    decode()
    return images / (time.perf_counter() - start), (cpu_seconds(children) - before) / images


async def start(pool: DecoderPool) -> None:
    pool.start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", type=int, default=200)
    options = parser.parse_args()
    photos = [draw_photo(number) for number in range(8)]
    requests = [DecodeRequest(photos[n % 8], f"{n}.jpg", SPEC) for n in range(options.images)]
    pool, threads, loop = DecoderPool(), ThreadPoolExecutor(DECODERS), asyncio.new_event_loop()
    loop.run_until_complete(start(pool))

    def in_sandbox() -> None:
        found = loop.run_until_complete(pool.decode(requests))
        assert all(isinstance(pixels, np.ndarray) for pixels in found), "every photo is decoded"

    def in_process() -> None:
        for future in [threads.submit(decode_inputs, pack_requests([request])) for request in requests]:
            future.result()

    in_sandbox()
    in_process()
    tasks = Path("/proc/self/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text(encoding="ascii").split()]
    speeds, costs = list[float](), list[float]()
    for number in range(options.rounds):
        found = {}
        for decode in (in_sandbox, in_process) if number % 2 else (in_process, in_sandbox):
            found[decode] = measure(decode, children, options.images)
        speeds.append(found[in_sandbox][0] / found[in_process][0])
        costs.append(found[in_sandbox][1] / found[in_process][1])
        print(f"{found[in_sandbox][0]:8.0f} images/s in the sandbox, {found[in_process][0]:8.0f} without", flush=True)
    pool.close()
    loop.close()
    print(f"CPU time in the sandbox / without: {statistics.median(costs):.3f}")
    sys.exit(0 if check_ratio("images/s in the sandbox", "decoding in the process", speeds, TARGET) else 1)


if __name__ == "__main__":
    main()
