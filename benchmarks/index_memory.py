"""Memory of the index of a large folder of images in one process, after the index was cached.

    python benchmarks/index_memory.py --images 1000000

The index is made up: no image is written.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from convolve.data.readers import index
from convolve.data.readers.locations import SampleLocation


def read_memory() -> dict[str, float]:
    """Return the memory of this process alone, and what it maps from files, which processes share, in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return {"own": sizes["Anonymous"], "mapped from files": sizes["Rss"] - sizes["Anonymous"]}


def open_index(images: int) -> None:
    """Open the cached index as a rank does, read places and names of some samples, and print the memory it takes."""
    before = read_memory()
    found = index.load_or_build(Path("/"), "benchmark", "signature", lambda: build(images))
    used = found.take(np.arange(0, images, 2))
    for row in range(0, len(used), 1000):
        used.name(row)
    after = read_memory()
    print(", ".join(f"{kind} {after[kind] - before[kind]:.0f} MiB" for kind in after))


def build(images: int) -> index.Index:
    """Return an index with the file names of ImageNet."""
    files = [f"train/n{number % 1000:08}/n{number % 1000:08}_{number}.JPEG" for number in range(images)]
    samples = (SampleLocation(n, 0, index.WHOLE_FILE, n % 1000, file) for n, file in enumerate(files))
    return index.make_index(Path("/"), files, samples)


def main() -> None:
    """Write the index in one process, and open it in another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1_000_000)
    images = parser.parse_args().images
    if "CONVOLVE_INDEX_BENCHMARK" in os.environ:
        open_index(images)
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CONVOLVE_CACHE": folder, "CONVOLVE_INDEX_BENCHMARK": "1"}
        for title in ("built", "opened"):
            print(f"{title}: ", end="", flush=True)
            command = [sys.executable, __file__, "--images", str(images)]
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
