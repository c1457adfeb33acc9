"""Samples that live in memory as bytes: a batch is one gather and a few operations on the whole of it."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from convolve.data.dataset import Split
from convolve.data.transforms.augment import NUMBERS, Augment, crop_and_resize, crop_padded, flip_images, pad_images
from convolve.data.transforms.normalize import Transform
from convolve.rng import Indices, SampleRNG


class InMemoryFetcher:
    """A split on the device. Images are augmented at their stored size and then resized, if the network asks for it."""

    ahead = 0

    def __init__(self, split: Split, transform: Transform, device: torch.device, augment: Augment) -> None:
        self.labels = split.labels
        self.skipped: list[str] = []
        self._images = torch.from_numpy(split.images).to(device)
        self._fill = torch.tensor([round(255 * mean) for mean in transform.mean], dtype=torch.uint8, device=device)
        self._size = (transform.height, transform.width)
        self._augment = augment
        self._device = device
        self._padded = (
            pad_images(self._images, augment.padding, augment.padding_mode, self._fill)
            if augment.crop == "pad"
            else self._images
        )

    def begin(self, rows: Indices, draw: SampleRNG | None) -> "_Fetch":
        """Nothing is begun in advance: the gather is quicker than any thread."""
        return _Fetch(self, rows, draw)

    def fetch(self, rows: Indices, draw: SampleRNG | None) -> Tensor:
        """Pixels of the samples in `rows`."""
        places = torch.from_numpy(rows).to(self._device)
        if draw is None:
            return self._resize(self._images.index_select(0, places))
        pixels = self._cropped(places, rows, draw)
        augment = self._augment
        if augment.flip != "none":
            flips = draw.flips(rows, augment.flip == "alternating")
            pixels = flip_images(pixels, torch.from_numpy(flips).to(self._device))
        pixels = augment.colors(pixels, rows, draw)
        return self._resize(augment.cut(pixels, rows, draw, self._fill))

    def _cropped(self, places: Tensor, rows: Indices, draw: SampleRNG) -> Tensor:
        augment = self._augment
        if augment.crop == "pad":
            numbers = draw.numbers(rows, 2, "crop")
            corners = torch.from_numpy((numbers * (2 * augment.padding + 1)).astype(np.int64)).to(self._device)
            height, width = self._images.shape[1:3]
            return crop_padded(self._padded, places, corners, (height, width))
        pixels = self._images.index_select(0, places)
        if augment.crop == "resized":
            return crop_and_resize(pixels, draw.numbers(rows, NUMBERS, "crop"), augment)
        return pixels

    def _resize(self, pixels: Tensor) -> Tensor:
        if pixels.shape[1:3] == self._size:
            return pixels
        images = pixels.permute(0, 3, 1, 2).to(torch.float32)
        resized = functional.interpolate(images, self._size, mode="bilinear", antialias=True, align_corners=False)
        return resized.permute(0, 2, 3, 1)


class _Fetch:
    def __init__(self, stock: InMemoryFetcher, rows: Indices, draw: SampleRNG | None) -> None:
        self._stock, self._rows, self._draw = stock, rows, draw

    def __call__(self) -> tuple[Tensor, Indices]:
        return self._stock.fetch(self._rows, self._draw), np.arange(len(self._rows))
