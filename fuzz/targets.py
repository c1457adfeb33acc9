"""Fuzz targets: one function for each kind of input from others.

A target takes any bytes. It may reject them with a `ConvolveError` in one line. Any other exception, a crash, a hang
and excessive memory are findings. Targets of native code read shapes and values from the bytes and compare with torch.
"""

import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

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
from convolve.kernels import (
    batch_norm,
    checksum,
    conv_pool,
    depthwise,
    half_partials,
    jpeg,
    jpeg_region,
    resize,
    rounding,
    winograd,
)
from convolve.kernels.binding import Kernel
from convolve.loggers.files import read_points
from convolve.numerics.formats import BF16, FP16
from convolve.numerics.half_accumulation import Convolution
from convolve.numerics.policy import read_mix_list
from convolve.numerics.rounding import Grid
from convolve.report.numerics_section import read_numerics
from convolve.serving.requests import Limits, PredictOptions, parse_uploads
from record_files import write_records

Target = Callable[[bytes], object]
LIMIT = 1 << 24  # bytes that a reader may allocate for a file
MOST_PIXELS = 1 << 20
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
    if not {"-h", "--help"} & set(words) and not any(word.startswith("--config-path") for word in words):
        read_config(train.read_options(words))


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


# Native code


class Numbers:
    """Draws shapes and values from bytes; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def integer(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`."""
        piece = self._data[self._at : self._at + 2].ljust(2, b"\0")
        self._at += 2
        return low + int.from_bytes(piece, "little") % (high - low + 1)

    def tensor(self, *shape: int, spread: float = 1.0) -> Tensor:
        """Return values from -spread to spread that repeat the remaining bytes, in channels-last format if possible."""
        rest = np.frombuffer(self._data[self._at :] or b"\x01", np.uint8).astype(np.float32)
        values = torch.from_numpy(np.resize(rest, shape)) / 127.5 - 1
        values = values * spread
        return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values


def _require_close(ours: Tensor, reference: Tensor, tolerance: float) -> None:
    assert ours.shape == reference.shape
    if reference.numel():
        error = float((ours - reference).abs().max()) / (float(reference.abs().max()) + 1)
        assert error <= tolerance, f"off by {error:g} of {tuple(reference.shape)}"


def _compare(native: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Compare values and gradients of two functions."""
    results = []
    for function in (native, plain):
        leaves = [value.clone().requires_grad_() for value in inputs]
        out = function(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for ours, reference in zip(*results, strict=True):
        _require_close(ours, reference, 1e-3)


def run_depthwise(data: bytes) -> None:
    """Compare the depthwise convolution with torch's."""
    draw = Numbers(data)
    channels, size, stride = draw.integer(1, 80), draw.integer(1, 7), draw.integer(1, 3)
    shape = (draw.integer(0, 3), channels, draw.integer(1, 20), draw.integer(1, 20))
    x, weight = draw.tensor(*shape), draw.tensor(channels, 1, size, size)
    if (
        isinstance(depthwise.load(), Kernel)
        and depthwise.supports(channels, size, stride)
        and depthwise.can_run(x, weight)
    ):
        _compare(
            lambda x, weight: depthwise.convolve(x, weight, stride),
            lambda x, weight: functional.conv2d(x, weight, None, stride, size // 2, groups=channels),
            x,
            weight,
        )


def run_winograd(data: bytes) -> None:
    """Compare the 3x3 convolution with torch's."""
    draw = Numbers(data)
    inputs, outputs = 16 * draw.integer(1, 4), 16 * draw.integer(1, 4)
    x = draw.tensor(draw.integer(0, 3), inputs, draw.integer(1, 19), draw.integer(1, 19))
    weight = draw.tensor(outputs, inputs, 3, 3)
    if isinstance(winograd.load(), Kernel) and winograd.supports(inputs, outputs) and winograd.can_run(x):
        _compare(winograd.convolve, lambda x, weight: functional.conv2d(x, weight, padding=1), x, weight)


def run_conv_pool(data: bytes) -> None:
    """Compare convolution, pooling and ReLU with torch's. Ties have no defined gradient, so values only."""
    draw = Numbers(data)
    geometry = conv_pool.Geometry((draw.integer(0, 3), draw.integer(0, 3)), bool(draw.integer(0, 1)))
    kernel = (draw.integer(1, 40), draw.integer(1, 20), draw.integer(1, 6), draw.integer(1, 6))
    x = draw.tensor(draw.integer(0, 3), kernel[1], draw.integer(1, 20), draw.integer(1, 20))
    weight, bias = draw.tensor(*kernel), draw.tensor(kernel[0])
    fits = min(kernel[2] - 2 * geometry.padding[0] - x.shape[2], kernel[3] - 2 * geometry.padding[1] - x.shape[3])
    if not isinstance(conv_pool.load(), Kernel) or fits > 0 or not conv_pool.can_run(x, weight, bias, geometry):
        return
    plain = functional.conv2d(x, weight, bias, padding=geometry.padding)
    plain = functional.max_pool2d(plain, 2, ceil_mode=geometry.ceil_mode).relu()
    leaf = x.clone().requires_grad_()
    ours = conv_pool.conv_pool_relu(leaf, weight, bias, geometry)
    ours.sum().backward()
    _require_close(ours.detach(), plain, 1e-3)
    assert leaf.grad is not None and bool(torch.isfinite(leaf.grad).all())


def run_batch_norm(data: bytes) -> None:
    """Compare batch norm with torch's in float64; that of float32 loses digits if the variance is small."""
    draw = Numbers(data)
    channels, activation = draw.integer(1, 200), ("none", "relu")[draw.integer(0, 1)]
    x = draw.tensor(draw.integer(1, 4), channels, draw.integer(1, 12), draw.integer(1, 12), spread=draw.integer(1, 100))
    weight, bias = draw.tensor(channels), draw.tensor(channels)
    if (
        x.numel() // channels < 2
        or not isinstance(batch_norm.load(), Kernel)
        or not batch_norm.can_run(x, weight, bias)
    ):
        return
    exact = functional.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True, eps=1e-3)
    ours = batch_norm.normalize(x, weight, bias, 1e-3, activation)[0]
    _require_close(ours.detach(), exact.relu() if activation == "relu" else exact, 1e-3)


def run_resize(data: bytes) -> None:
    """Compare resizing in native code with torch's, to the bit."""
    draw = Numbers(data)
    flip, bytes_of = bool(draw.integer(0, 1)), np.frombuffer(data or b"\x01", np.uint8)
    pixels = np.resize(bytes_of, (draw.integer(1, 90), draw.integer(1, 90), 3))
    side = (draw.integer(1, 70), draw.integer(1, 70), 3)
    ours, reference = (torch.zeros(side, dtype=torch.uint8) for _ in range(2))
    if native := resize.load():
        native([resize.ResizeJob(pixels, ours, flip)])
        resize.resize_by_torch([resize.ResizeJob(pixels, reference, flip)])
        assert torch.equal(ours, reference), f"{pixels.shape} to {side}, flip {flip}"


def run_rounding(data: bytes) -> None:
    """Round any bit patterns in place to every format."""
    kernel, draw = rounding.load(), Numbers(data)
    kind, clamped, key = draw.integer(0, 3), bool(draw.integer(0, 1)), draw.integer(0, 1 << 15)
    values = torch.from_numpy(np.frombuffer(data[: len(data) // 4 * 4], np.float32).copy())
    if kernel is not None and len(values):
        kernel.round_(values, kind, clamped=clamped, key=key)


def run_checksum(data: bytes) -> None:
    """Compare the checksums of blocks of any length with Python's sums."""
    draw, words = Numbers(data), np.frombuffer(data[: len(data) // 4 * 4], np.uint32)
    blocks = np.split(words, sorted(draw.integer(0, len(words)) for _ in range(draw.integer(0, 20))))
    sums = checksum.bind(blocks)()
    assert sums.tolist() == [sum(block.tolist()) % 2**32 for block in blocks]


def run_half_partials(data: bytes) -> None:
    """Run a convolution with half partials and its gradients."""
    draw = Numbers(data)
    grid, groups = Grid((FP16, BF16)[draw.integer(0, 1)], bool(draw.integer(0, 1))), draw.integer(1, 3)
    stride, padding, dilation = ([draw.integer(low, 3) for _ in "hw"] for low in (1, 0, 1))
    channels, outputs = (groups * draw.integer(1, 40) for _ in "xy")
    x = draw.tensor(draw.integer(0, 3), channels, draw.integer(1, 9), draw.integer(1, 9))
    weight = draw.tensor(outputs, channels // groups, draw.integer(1, 4), draw.integer(1, 4))
    height, width = half_partials.Window(stride, padding, dilation, groups).output_size(x, weight)
    if min(height, width) < 1 or not isinstance(half_partials.load(grid.format is BF16), Kernel):
        return
    convolution, key = Convolution(stride, padding, dilation, groups, grid), draw.integer(0, 1) or None
    y = convolution.forward(x, weight, None, key)
    assert y.shape == (len(x), outputs, height, width)
    gradients = convolution.backward(y, x, weight, (True, True, False), key)
    assert all(
        found is not None and found.shape == like.shape for found, like in zip(gradients, (x, weight), strict=False)
    )


def run_jpeg(path: Path) -> None:
    """Read a JPEG and decode half of it in native code, with a good file next to it and with little memory."""
    good = path.with_name("good.jpg")
    if not good.exists():
        shutil.copyfile(Path(__file__).parent / "corpus" / "jpeg" / "gray", good)
    extents = np.array([[0, 0, -1], [0, 3, 40], [0, 0, -1]], np.int64)
    decode = jpeg_region.load()
    for found in jpeg.read_jpegs([bytes(path), bytes(path), bytes(good)], extents, np.empty(4096, np.uint8)):
        if decode and found and found.size[0] * found.size[1] <= MOST_PIXELS:
            height, width = found.size
            region = jpeg_region.Region(height, width, 1, 0, width // 2, height, width - width // 2)
            decode(found.data, region, np.empty(region.buffer_bytes, np.uint8))


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
