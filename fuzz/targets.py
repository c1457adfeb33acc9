"""Fuzz targets: one function for each kind of input from others.

A target takes any bytes. It may reject them with a `ConvolveError` in one line. Any other exception, a crash, a hang
and excessive memory are findings. Those of native code are in `native_targets.py`.
"""

import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch

from convolve.checkpoint.manifest import encode_manifest
from convolve.checkpoint.pretrained import read_weights
from convolve.checkpoint.snapshot import Snapshot, encode
from convolve.checkpoint.store import load
from convolve.cli import train
from convolve.cli.command import read_config
from convolve.compat.options import RejectedOptions
from convolve.config.loading import load_entries, parse, resolve, shipped
from convolve.data.image_io import decode_image
from convolve.data.readers import records
from convolve.data.readers.cifar import read_fields
from convolve.data.readers.image_folder import read_boxes
from convolve.data.readers.label_file import read_label_file
from convolve.data.readers.mat_file import read_synsets
from convolve.data.readers.mnist import read_images, read_labels, read_npz
from convolve.data.readers.raw_store import open_raw
from convolve.data.readers.tar_members import locate_samples
from convolve.errors import ConvolveError
from convolve.inference.metadata import ModelMetadata
from convolve.loggers.files import read_points
from convolve.numerics.policy import read_mix_list
from convolve.report.numerics_section import read_numerics
from convolve.serving.requests import Limits, PredictOptions, parse_uploads
from native_targets import (
    MOST_PIXELS,
    run_batch_norm,
    run_checksum,
    run_conv_pool,
    run_depthwise,
    run_half_partials,
    run_jpeg,
    run_jpeg_region,
    run_resize,
    run_rounding,
    run_winograd,
)
from record_files import write_records

Target = Callable[[bytes], object]
LIMIT = 1 << 24  # bytes that a reader may allocate for a file
CONTENT_TYPES = ("application/json", "multipart/form-data; boundary=xx", "image/png", "text/html", "")


@cache
def scratch() -> Path:
    """Return a folder for the files of this process, in memory if the system has such a place."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="convolve-fuzz-", dir=memory if memory.is_dir() else None))


def remove_scratch() -> None:
    """Remove the files of this process."""
    shutil.rmtree(scratch(), ignore_errors=True)


def read_as(name: str, read: Callable[[Path], object]) -> Target:
    """Return a target that reads the bytes as a file."""

    def target(data: bytes) -> None:
        path = scratch() / name
        path.write_bytes(data)
        read(path)

    return target


def read_example(data: bytes) -> None:
    """Read a TFRecord file with these bytes as the only record and correct checksums."""
    path = scratch() / "train-00000-of-00001"
    write_records(path, [data])
    records.locate_samples(path, 0)


def read_raw_store(data: bytes) -> None:
    """Read a raw store whose images have this header."""
    root = scratch() / "raw"
    if not root.exists():
        root.mkdir()
        np.save(root / "train-labels.npy", np.zeros(4, np.int64))
    (root / "train-images.npy").write_bytes(data)
    reader = open_raw(root, "train", classes=2)
    for row in range(len(reader)):
        reader.read(row)


def read_command_line(data: bytes) -> None:
    """Read the options of `convolve train`, separated by newlines."""
    words = data.decode("utf-8", "replace").split("\n")
    if any(word.startswith("--config-path") for word in words):
        return
    try:
        read_config(train.read_options(words))
    except SystemExit as exit:
        # Help, which argparse also finds in words like `-h--`. Everything else must be a rejection.
        if exit.code:
            raise


def read_config_file(data: bytes) -> None:
    """Read a file of configs and resolve each of them."""
    path = scratch() / "configs.yml"
    path.write_bytes(data)
    for name in load_entries(path).keys() - shipped().keys():
        resolve(name, path)


def read_saved_config(data: bytes) -> None:
    """Read the config of a run."""
    parse(data.decode("utf-8", "replace"), "config.yml")


@cache
def checkpoint_files() -> dict[str, bytes]:
    """Return the files of a small checkpoint, without its manifest."""
    return encode(Snapshot({"model": {"w": torch.ones(2)}}, {"step": 1, "samples": 2}))


def _load_checkpoint(files: dict[str, bytes]) -> None:
    folder = scratch() / "step-000000001"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    load(folder)


def read_manifest(data: bytes) -> None:
    """Read a checkpoint with this manifest."""
    _load_checkpoint({**checkpoint_files(), "manifest.json": data})


def read_state(data: bytes) -> None:
    """Read a checkpoint with this state and a valid manifest."""
    files = {**checkpoint_files(), "state.json": data}
    _load_checkpoint({**files, "manifest.json": encode_manifest(files)})


def read_http_body(data: bytes) -> None:
    """Read a request body and its options; the first byte chooses the content type."""
    kind = CONTENT_TYPES[data[0] % len(CONTENT_TYPES)] if data else ""
    _, options = parse_uploads(data[1:], kind, Limits())
    PredictOptions.parse(options)


def read_http_query(data: bytes) -> None:
    """Read the options of a prediction."""
    text = data.decode("utf-8", "replace")
    PredictOptions.parse(dict(pair.partition("=")[::2] for pair in text.split("&")))


TARGETS: dict[str, Target] = {
    "idx-images": read_as("images-idx3-ubyte", lambda path: read_images(path, limit=LIMIT)),
    "idx-labels": read_as("labels-idx1-ubyte", lambda path: read_labels(path, limit=LIMIT)),
    "idx-gzip": read_as("images-idx3-ubyte.gz", lambda path: read_images(path, limit=LIMIT)),
    "npz": read_as("mnist.npz", lambda path: read_npz(path, limit=LIMIT)),
    "cifar-pickle": read_as("data_batch_1", lambda path: read_fields(path, limit=LIMIT)),
    "tar": read_as("train-0.tar", lambda path: locate_samples(path, 0)),
    "tfrecord": read_as("train-00000-of-00001", lambda path: records.read_records(path, limit=LIMIT)),
    "example": read_example,
    "raw-store": read_raw_store,
    "labels": read_as("labels.csv", read_label_file),
    "synsets": read_as("meta.mat", read_synsets),
    "boxes": read_as("boxes.csv", read_boxes),
    "image": lambda data: decode_image(data, "image", channels=3, largest=MOST_PIXELS),
    "config": read_config_file,
    "saved-config": read_saved_config,
    "command-line": read_command_line,
    "mix-list": read_as("mix.json", read_mix_list),
    "safetensors": read_as("x.safetensors", read_weights),
    "manifest": read_manifest,
    "state": read_state,
    "metadata": lambda data: ModelMetadata.from_json(data.decode("utf-8", "replace"), "model.onnx"),
    "events": read_as("events.jsonl", read_numerics),
    "table": read_as("training.csv", lambda path: read_points(path, "loss")),
    "http-body": read_http_body,
    "http-query": read_http_query,
    "depthwise": run_depthwise,
    "winograd": run_winograd,
    "conv-pool": run_conv_pool,
    "batch-norm": run_batch_norm,
    "resize": run_resize,
    "rounding": run_rounding,
    "checksum": run_checksum,
    "half-partials": run_half_partials,
    "jpeg": read_as("x.jpg", run_jpeg),
    "jpeg-region": run_jpeg_region,
}


def attempt(target: Target, data: bytes) -> bool:
    """Give bytes to a target. Returns True if they were accepted; a rejection must be one line."""
    try:
        target(data)
    except ConvolveError as error:
        one_line = len(str(error).splitlines()) <= 1 or isinstance(error, RejectedOptions)
        assert one_line and len(str(error)) < 8000, str(error)[:300]
        return False
    return True
