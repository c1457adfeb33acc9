"""Images in memory: a batch is one gather and a few operations on all of it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from convolve.data.dataset import Images, Labels
from convolve.data.image_io import MAX_CHANNELS
from convolve.data.loader.decoding import DecodingOptions
from convolve.data.loader.loader import Fetched, PendingPixels
from convolve.data.transforms.augment import NUMBERS, Augment, crop_and_resize, crop_padded, flip_images, pad_images
from convolve.data.transforms.normalize import Transform, fit_channels
from convolve.device import copy_to
from convolve.errors import DataError
from convolve.rng import Indices, SampleRNG

MAX_SIDE = 4096


@dataclass(frozen=True)
class InMemoryImages:
    """A reader of images [N, H, W, C] with any number of channels, and labels [N]."""

    images: Images
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        height, width, channels = self.images.shape[1:]
        return height, width, channels

    def take(self, rows: Indices) -> "InMemoryImages":
        """Return some of the samples, in this order; consecutive ones are not copied."""
        if len(rows) and (np.diff(rows) == 1).all():
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            return InMemoryImages(self.images[part], self.labels[part])
        return InMemoryImages(self.images[rows], self.labels[rows])

    def fit_transform(self, normalization: str, size: int | None = None, photo_size: int | None = None) -> Transform:
        height, width, channels = self.image_shape
        mean, std = fit_channels(self.images, normalization)
        assert len(mean) == channels, f"{len(mean)} means for {channels} channels"
        return Transform(size or height, size or width, mean, std)

    def fetcher(
        self, transform: Transform, augment: Augment, device: torch.device, options: DecodingOptions | None = None
    ) -> "InMemoryFetcher":
        return InMemoryFetcher(self, transform, device, augment)


def check_images(images: Images, labels: Labels, *, classes: int | None, source: str) -> InMemoryImages:
    """Join images [N, H, W] or [N, H, W, C] and their labels, or raise DataError if they do not belong together.

    Args:
        classes: number of classes; None accepts any label from 0 up.
        source: the files, as an error message names them.
    """
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or not 1 <= images.shape[3] <= MAX_CHANNELS:
        raise DataError(
            f"{source}: image array of shape {images.shape}: must be [count, height, width] or [..., channels]"
        )
    if not all(1 <= side <= MAX_SIDE for side in images.shape[1:3]):
        raise DataError(f"{source}: images of {images.shape[1]} x {images.shape[2]}: sides must be 1 to {MAX_SIDE}")
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"{source}: {len(images)} images but labels of shape {labels.shape}: the files do not belong together"
        )
    if not len(labels):
        raise DataError(f"{source}: contains no image; get a complete copy")
    wrong = labels < 0 if classes is None else (labels < 0) | (labels >= classes)
    if wrong.any():
        row = int(np.argmax(wrong))
        rule = "0 or more" if classes is None else f"0 to {classes - 1}"
        raise DataError(f"{source}: label {int(labels[row])} of sample {row}: must be {rule}; get an undamaged copy")
    return InMemoryImages(np.ascontiguousarray(images), labels)


class InMemoryFetcher:
    """Gathers images on the device, augments them at their stored size, then resizes them if the transform requires it.

    Prefetches nothing: the gather is faster than handing it to a thread.
    """

    ahead = 0
    can_skip_images = True

    def __init__(self, reader: InMemoryImages, transform: Transform, device: torch.device, augment: Augment) -> None:
        self.labels = reader.labels
        self.skipped: list[str] = []
        self._images = torch.from_numpy(reader.images).to(device)
        self._fill = torch.tensor([round(255 * mean) for mean in transform.mean], dtype=torch.uint8, device=device)
        self._size = (transform.height, transform.width)
        self._augment = augment
        self._device = device
        self._padded = (
            pad_images(self._images, augment.padding, augment.padding_mode, self._fill)
            if augment.crop == "pad"
            else self._images
        )

    def start(self, rows: Indices, rng: SampleRNG | None, keys: Indices | None = None) -> PendingPixels:
        return lambda: Fetched(self.fetch(rows, rng, keys), np.arange(len(rows)))

    def fetch(self, rows: Indices, rng: SampleRNG | None, keys: Indices | None = None) -> Tensor:
        """Return the pixels of the samples in `rows`; `keys` are the sample numbers of the augmentation [rows]."""
        selected = copy_to(torch.from_numpy(rows), self._device)
        if rng is None:
            return self._resize(self._images.index_select(0, selected))
        rows = rows if keys is None else keys
        pixels = self._crop(selected, rows, rng)
        augment = self._augment
        if augment.flip != "none":
            flips = rng.flips(rows, augment.flip == "alternating")
            pixels = flip_images(pixels, copy_to(torch.from_numpy(flips), self._device))
        pixels = augment.colors(pixels, rows, rng)
        return self._resize(augment.cut(pixels, rows, rng, self._fill))

    def _crop(self, selected: Tensor, rows: Indices, rng: SampleRNG) -> Tensor:
        augment = self._augment
        if augment.crop == "pad":
            numbers = rng.numbers(rows, 2, "crop")
            offsets = torch.from_numpy((numbers * (2 * augment.padding + 1)).astype(np.int64))
            corners = copy_to(offsets, self._device)
            height, width = self._images.shape[1:3]
            return crop_padded(self._padded, selected, corners, (height, width))
        pixels = self._images.index_select(0, selected)
        if augment.crop == "resized":
            return crop_and_resize(pixels, rng.numbers(rows, NUMBERS, "crop"), augment)
        return pixels

    def _resize(self, pixels: Tensor) -> Tensor:
        if pixels.shape[1:3] == self._size:
            return pixels
        images = pixels.permute(0, 3, 1, 2).to(torch.float32)
        resized = functional.interpolate(images, self._size, mode="bilinear", antialias=True, align_corners=False)
        return resized.permute(0, 2, 3, 1)
