"""Input: convolve's loader, and simplejpeg, tf.data, WebDataset, grain, SPDL and DALI, from JPEG files to batches.

    python benchmarks/loader_peers.py [--rounds 5] [--images 512] [--batches 32]
        [--peers simplejpeg tfdata webdataset grain spdl dali] [--envs FOLDER]

The task is described in `peers/loading.py`. simplejpeg only decodes whole images, without crop and resize, and is the
bound that loaders are measured by. All use two threads or processes and are called as documented, each in a separate
virtual environment (WebDataset shares torch with this one), in alternating turns. The images are made by this script:
smooth color noise in several sizes with some grain, 500 x 375. Target: 1.0 of simplejpeg. Exits with 1 if it is missed.
A peer that cannot be installed or does not run is reported with the reason.
"""

import argparse
import io
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from convolve.device import cache_folder
from turns import HERE, PeerUnavailable, Rounds, check_ratio, compare, peer_python, report_row, take_turns

PACKAGES: dict[str, tuple[str, ...]] = {
    "simplejpeg": (),
    "tfdata": ("tensorflow-cpu",),
    "webdataset": ("webdataset", "braceexpand", "--no-deps"),
    "grain": ("grain", "pillow"),
    "spdl": ("spdl", "numpy"),
    "dali": ("nvidia-dali-cuda120", "numpy"),
}
WIDTH, HEIGHT, QUALITY, SHARDS = 500, 375, 90, 2
SCALES = (4, 8, 16, 32, 64, 128)
TARGET, BOUND = 1.0, "simplejpeg"
FIGURES = {"images/s": "images_per_second", "images per CPU second": "images_per_processor_second"}


def make_photo(seed: int) -> npt.NDArray[np.uint8]:
    """Return smooth color noise at several scales, the larger the stronger, with some grain."""
    rng = np.random.default_rng(seed)
    total = rng.normal(0, 6, (HEIGHT, WIDTH, 3))
    for scale in SCALES:
        coarse = rng.integers(0, 256, (-(-HEIGHT // scale), -(-WIDTH // scale), 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        total += np.asarray(smooth) * (scale / sum(SCALES))
    return np.clip(total, 0, 255).astype(np.uint8)


def write_images(folder: Path, count: int) -> int:
    """Write a folder of two classes and the same images in tars; returns the mean number of bytes."""
    sizes = []
    with ExitStack() as stack:
        tars = [stack.enter_context(tarfile.open(folder / f"shard-{number}.tar", "w")) for number in range(SHARDS)]
        for number in range(count):
            file = io.BytesIO()
            Image.fromarray(make_photo(number)).save(file, "JPEG", quality=QUALITY)
            data, label = file.getvalue(), number % 2
            sizes.append(len(data))
            for split in ("train", "val") if number < 2 else ("train",):
                path = folder / split / f"class{label}" / f"{number:05}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            for name, content in (("jpg", data), ("cls", str(label).encode())):
                entry = tarfile.TarInfo(f"{number:05}.{name}")
                entry.size = len(content)
                tars[number // 2 % SHARDS].addfile(entry, io.BytesIO(content))
    return sum(sizes) // count


def worker_command(name: str, environments: Path, folder: Path, batches: int) -> list[str]:
    packages = PACKAGES.get(name, ())
    python = peer_python(name, packages, environments, shared="--no-deps" in packages)
    return [str(python), str(HERE / "peers" / f"{name}_loader.py"), str(folder), str(batches)]


def find_commands(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Return the commands of the loaders that run; the others are reported with the reason."""
    commands = {}
    for name in ("convolve", *options.peers):
        try:
            commands[name] = worker_command(name, options.envs, folder, options.batches)
            take_turns({name: commands[name]}, 0)
        except (PeerUnavailable, SystemExit) as error:
            if name == "convolve":
                raise
            commands.pop(name, None)
            report_row("images/s", name, [], note=str(error))
    return commands


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batches", type=int, default=32, help="batches of a turn [32]")
    parser.add_argument("--peers", nargs="*", default=list(PACKAGES), choices=list(PACKAGES))
    parser.add_argument("--envs", type=Path, default=cache_folder() / "peers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        size = write_images(Path(scratch), options.images)
        print(f"{options.images} images of {WIDTH} x {HEIGHT}, {size} bytes each", flush=True)
        found = take_turns(find_commands(options, Path(scratch)), options.rounds)
    return report(found)


def report(found: Rounds) -> int:
    for peer in found:
        if peer not in ("convolve", BOUND):
            for what, figure in FIGURES.items():
                report_row(what, peer, compare(found, "convolve", peer, figure))
    if BOUND not in found:
        return 0
    passed = [
        check_ratio(what, BOUND, compare(found, "convolve", BOUND, figure), TARGET) for what, figure in FIGURES.items()
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
