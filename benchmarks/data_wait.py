"""Time that training waits for data: ResNet-18 at 128 pixels from folders, tar files, TFRecords and a raw store.

    python benchmarks/data_wait.py FOLDER [--iterations 100] [--batch-size 4]

FOLDER has train/ and val/ of JPEG images; the other formats are created from it in a temporary folder. Every run is
ordinary, with default input options (threads, cache). The fraction of time spent waiting is read from `summary.json`.
Exits with 1 if it is 5 % or more in any format.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from convolve import device
from convolve.runs import session

device.prepare()
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from convolve.config.loading import resolve  # noqa: E402
from convolve.data.dataset import Dataset  # noqa: E402
from convolve.data.loader.decoding import EncodedImages  # noqa: E402
from convolve.data.prepare import PrepareOptions, prepare  # noqa: E402
from convolve.data.readers.detect import open_images  # noqa: E402
from convolve.download import ignore_progress  # noqa: E402
from convolve.loggers.base import SilentConsole  # noqa: E402
from record_files import Sample, write_imagenet  # noqa: E402

SIZE, STORED_SIZE, LIMIT = 128, 160, 0.05


def list_samples(reader: EncodedImages) -> list[Sample]:
    return [(bytes(reader.read(row)), label) for row, label in enumerate(reader.labels.tolist())]


def write_formats(dataset: Dataset[EncodedImages], scratch: Path) -> None:
    prepare(dataset, scratch / "tar", PrepareOptions("webdataset"), 2, ignore_progress)
    prepare(dataset, scratch / "raw store", PrepareOptions("raw", size=STORED_SIZE), 2, ignore_progress)
    write_imagenet(scratch / "tfrecord", list_samples(dataset.train), list_samples(dataset.test), shards=8)


def run(data: Path, run_dir: Path, options: argparse.Namespace) -> dict[str, float]:
    """Train and return the summary of the run."""
    options_by_name = {
        "model": "resnet18",
        "data_dir": data,
        "image_size": SIZE,
        "batch_size": options.batch_size,
        "iterations": options.iterations,
        "epochs": None,
        "validation_mode": "none",
        "log_freq": 20,
        "curves": False,
        "report": False,
        "run_dir": run_dir,
    }
    session.train(resolve(None, None, options_by_name).config, SilentConsole())
    summary: dict[str, float] = json.loads((run_dir / "summary.json").read_text())
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)
    options = parser.parse_args()
    dataset = open_images(options.folder, str(options.folder), ignore_progress)
    if dataset is None:
        print(f"{options.folder}: no images found")
        return 2
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        write_formats(dataset, Path(scratch))
        for kind in ("folder", "tar", "tfrecord", "raw store"):
            folder = options.folder if kind == "folder" else Path(scratch, kind)
            summary = run(folder, Path(scratch, f"run-{kind}"), options)
            fraction = summary["data_wait_share"]
            failed |= fraction >= LIMIT
            passed = "ok" if fraction < LIMIT else "MISSED"
            print(f"{kind:<10} waiting for data {fraction:6.2%} (under {LIMIT:.0%}) {passed}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
