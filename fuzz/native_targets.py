"""Fuzz targets of native code: shapes, values and images are drawn from the bytes, and results are compared.

The reference is torch, or for JPEGs the decoder of whole images and, where it computes the same, Pillow's.
"""

import io
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from convolve.data.loader.decoder import jpeg_size
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
from convolve.kernels.build import Unavailable
from convolve.layers.blocks import same_padding
from convolve.numerics.formats import BF16, FP16
from convolve.numerics.half_accumulation import Convolution
from convolve.numerics.rounding import Grid
from mutations import mutate

MOST_PIXELS = 1 << 20
GUARD_BYTES = 4096
SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")
# Scales below 1 at which Pillow, with its exact transform and smooth chroma filter, has the same pixels: there, every
# component is decoded by a reduced transform, which has one form, and no chroma filter is needed.
SAME_IN_PILLOW = {"444": (2, 4, 8), "422": (8,), "420": (4, 8), "440": (8,), "411": (2, 4, 8), "Gray": (2, 4, 8)}


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
        before, pads = None, (size // 2,) * 4
        if draw.integer(0, 1):
            vertical, horizontal = (same_padding(side, size, stride) for side in x.shape[2:])
            before, pads = (vertical[0], horizontal[0]), (*horizontal, *vertical)
        _compare(
            lambda x, weight: depthwise.convolve(x, weight, stride, before),
            lambda x, weight: functional.conv2d(functional.pad(x, pads), weight, None, stride, groups=channels),
            x,
            weight,
        )


def run_winograd(data: bytes) -> None:
    """Compare the 3x3 convolution with torch's."""
    draw = Numbers(data)
    inputs, outputs = 8 * draw.integer(2, 8), 8 * draw.integer(2, 8)
    x = draw.tensor(draw.integer(0, 3), inputs, draw.integer(1, 19), draw.integer(1, 19))
    weight = draw.tensor(outputs, inputs, 3, 3)
    if isinstance(winograd.load(), Kernel) and winograd.supports(inputs, outputs) and winograd.can_run(x, weight):
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


def _normalize(
    x: Tensor, weight: Tensor, bias: Tensor, frozen: Tensor | None, activation: batch_norm.Activation
) -> Tensor:
    """Return the native result, after its backward pass, whose memory the sanitizers check."""
    leaf = x.clone().requires_grad_()
    if frozen is None:
        y = batch_norm.normalize(leaf, weight, bias, 1e-3, activation)[0]
    else:
        y = batch_norm.normalize_frozen(leaf, weight, bias, frozen, 1e-3, activation)
    torch.autograd.backward(y.sum())
    return y.detach()


def run_batch_norm(data: bytes) -> None:
    """Compare batch norm with torch's in float64; that of float32 loses digits if the variance is small."""
    draw = Numbers(data)
    channels, activation = draw.integer(1, 200), batch_norm.ACTIVATIONS[draw.integer(0, 3)]
    x = draw.tensor(draw.integer(1, 4), channels, draw.integer(1, 12), draw.integer(1, 12), spread=draw.integer(1, 100))
    weight, bias = draw.tensor(channels), draw.tensor(channels)
    if (
        x.numel() // channels < 2
        or not isinstance(batch_norm.load(), Kernel)
        or not batch_norm.can_run(x, weight, bias)
    ):
        return
    frozen = draw.tensor(2, channels).square() if draw.integer(0, 1) else None
    statistics = (None, None) if frozen is None else frozen.double()
    exact = functional.batch_norm(
        x.double(), *statistics, weight.double(), bias.double(), training=frozen is None, eps=1e-3
    )
    activate = {"none": torch.clone, "relu": functional.relu, "silu": functional.silu, "relu6": functional.relu6}
    _require_close(_normalize(x, weight, bias, frozen, activation), activate[activation](exact), 1e-3)


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


def make_jpeg(draw: Numbers) -> tuple[bytes, tuple[int, int]]:
    """Return a JPEG of any kind that the loader decodes natively, and its height and width."""
    height, width, quality = draw.integer(8, 100), draw.integer(8, 100), draw.integer(1, 100)
    sampling, restart = SAMPLINGS[draw.integer(0, 5)], draw.integer(0, 8)
    progressive, noise = bool(draw.integer(0, 1)), draw.integer(0, 255)
    pixels = np.random.default_rng(noise).integers(0, noise + 1, (height, width, 3), np.uint8)
    pixels += np.arange(width, dtype=np.uint8)[:, None]
    if sampling in ("440", "411"):  # Pillow cannot write them
        return simplejpeg.encode_jpeg(pixels, quality, colorsubsampling=sampling), (height, width)
    image, sink = Image.fromarray(pixels).convert("L" if sampling == "Gray" else "RGB"), io.BytesIO()
    shape = {} if sampling == "Gray" else {"subsampling": ":".join(sampling)}
    image.save(sink, "JPEG", quality=quality, progressive=progressive, restart_marker_blocks=restart, **shape)
    return sink.getvalue(), (height, width)


def run_jpeg_region(data: bytes) -> None:
    """Compare boxes of a JPEG at every scale; half of the files are cut or have changed bits."""
    draw = Numbers(data)
    image, size = make_jpeg(draw)
    damage = draw.integer(0, 3)
    if damage == 2:
        image = image[: draw.integer(0, len(image))]
    elif damage == 3:
        image = mutate(image, random.Random(draw.integer(0, 1 << 15)))
    for scale in jpeg_region.SCALES:
        height, width = -(-size[0] // scale), -(-size[1] // scale)
        top, left = draw.integer(0, height - 1), draw.integer(0, width - 1)
        box = (top, left, draw.integer(1, height - top), draw.integer(1, width - left))
        found = compare_region(image, size, scale, box)
        assert found or damage > 1, f"{size} at 1/{scale}: {box} was not decoded"


@cache
def open_region_decoder() -> jpeg_region.RegionDecoder | Unavailable:
    """Return the native decoder without the comparison before its first use: other pixels are a finding here."""
    return jpeg_region.open_decoder()


def compare_region(data: jpeg.Encoded, size: tuple[int, int], scale: int, box: Sequence[int]) -> bool:
    """Decode a box and compare it with whole images. Returns whether it was decoded."""
    native = open_region_decoder()
    if isinstance(native, Unavailable):
        return True
    region = jpeg_region.Region(-(-size[0] // scale), -(-size[1] // scale), scale, *box)
    memory = np.full(region.buffer_bytes + 2 * GUARD_BYTES, GUARD_BYTES % 251, np.uint8)
    before, target, after = np.split(memory, [GUARD_BYTES, len(memory) - GUARD_BYTES])
    part = native.decode(data, region, target)
    part = None if part is None else part.copy()
    crops = [jpeg_region.Crop(data, region, pixels, flip=False) for pixels in torch.zeros((2, 9, 9, 3)).byte()]
    assert native.decode_crops(crops, target) == [part is not None] * 2, "one image has two outcomes"
    assert {*before, *after} == {GUARD_BYTES % 251}, "wrote outside the buffer"
    assert torch.equal(crops[0].target, crops[1].target), "the first image changed the second"
    if part is None:
        return False
    if jpeg_region.is_decodable(data, size) and jpeg_size(bytes(data)) == size:
        for whole in decode_wholes(data, region, size):
            expected = whole[region.top :, region.left :][: region.rows, : region.columns]
            assert np.array_equal(part, expected), f"{size} at 1/{scale}: {box} has other pixels than the whole image"
    return True


def decode_wholes(data: jpeg.Encoded, region: jpeg_region.Region, size: tuple[int, int]) -> list[npt.NDArray[np.uint8]]:
    """Return the whole image as each reference decodes it; none of them if it is damaged below the box."""
    try:
        wholes = [jpeg_region.decode_whole(data, (region.height, region.width), None)]
        if region.scale in SAME_IN_PILLOW[simplejpeg.decode_jpeg_header(data)[3]]:
            with Image.open(io.BytesIO(data)) as image:
                image.draft(None, (size[1] // region.scale, size[0] // region.scale))
                wholes.append(np.asarray(image.convert("RGB")))
    except (ValueError, OSError):
        return []
    return wholes


def run_jpeg(path: Path) -> None:
    """Read a JPEG in native code, with a good file next to it and with little memory, and compare half of it."""
    good = path.with_name("good.jpg")
    if not good.exists():
        shutil.copyfile(Path(__file__).parent / "corpus" / "jpeg" / "gray", good)
    extents = np.array([[0, 0, -1], [0, 3, 40], [0, 0, -1]], np.int64)
    for found in jpeg.read_jpegs([bytes(path), bytes(path), bytes(good)], extents, np.empty(4096, np.uint8)):
        if found and found.size[0] * found.size[1] <= MOST_PIXELS:
            for scale in jpeg_region.SCALES:
                height, width = -(-found.size[0] // scale), -(-found.size[1] // scale)
                compare_region(found.data, found.size, scale, (0, width // 2, height, width - width // 2))
