"""Encoded or memory-mapped images: decoded, cropped and resized by threads when they are needed.

A sample depends only on (seed, epoch, sample) and the image, so the number of threads does not change it.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from convolve.data.dataset import Images, Labels
from convolve.data.image_io import Box, center_box
from convolve.data.loader.decoder import Decoder, Sample
from convolve.data.loader.loader import Fetched, PendingPixels
from convolve.data.transforms.augment import NO_AUGMENT, NUMBERS, Augment, draw_box, draw_box_on
from convolve.data.transforms.normalize import Transform, fit_channels
from convolve.errors import DataError
from convolve.kernels.jpeg import Jpeg
from convolve.rng import Indices, SampleRNG

USUAL_PHOTO_SIZE = 224
_MAX_CHUNK = 16
_STEPS_AHEAD = 2
_STATISTICS_SAMPLES = 512


@dataclass(frozen=True)
class DecodingOptions:
    """Number of threads, bytes of memory for decoded images, and how many broken images are skipped before an error."""

    workers: int = 2
    cache_bytes: int = 0
    max_bad_samples: int = 0


class EncodedImages(ABC):
    """A reader of images outside memory; every image may have another size."""

    labels: Labels
    image_shape = None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, row: int) -> str:
        """Return the name of an image for messages."""

    @abstractmethod
    def read(self, row: int) -> bytes | Images:
        """Return an encoded image, or pixels [H, W, 3]."""

    @abstractmethod
    def take(self, rows: Indices) -> "EncodedImages": ...

    def file(self, row: int) -> Path | None:
        """Return the file that contains only this image, if there is one."""
        return None

    def read_jpegs(self, rows: Sequence[int], memory: Images) -> dict[int, Jpeg]:
        """Read as many of the images as one native call can read into `memory`."""
        return {}

    def objects(self, row: int) -> npt.NDArray[np.float32]:
        """Return boxes [K, 4] of objects in an image: left, top, right, bottom, as fractions of its sides."""
        return np.empty((0, 4), np.float32)

    def fit_transform(self, normalization: str, size: int | None = None, photo_size: int | None = None) -> Transform:
        """Return the transform of a normalization; `standard` is estimated from up to 512 images."""
        side = size or photo_size or USUAL_PHOTO_SIZE
        plain = Transform(side, side, (0.0,) * 3, (1.0,) * 3, side / int(side * 256 / 224))
        images = np.zeros((1, 1, 1, 3), np.uint8)
        if normalization == "standard":
            small = replace(plain, height=64, width=64)
            rows = np.unique(np.linspace(0, len(self) - 1, _STATISTICS_SAMPLES).astype(np.int64))
            options = DecodingOptions(workers=0, max_bad_samples=len(rows))
            fetcher = DecodingFetcher(self.take(rows), small, NO_AUGMENT, options)
            images = fetcher.start(np.arange(len(rows)), None)()[0].numpy()
        mean, std = fit_channels(images, normalization)
        return replace(plain, mean=mean, std=std)

    def fetcher(
        self, transform: Transform, augment: Augment, device: torch.device, options: DecodingOptions
    ) -> "DecodingFetcher":
        return DecodingFetcher(self, transform, augment, options)


def to_gray(pixels: Tensor) -> Tensor:
    """Convert RGB bytes [N, H, W, 3] to gray ones [N, H, W, 1] by (19595 R + 38470 G + 7471 B + 2^15) / 2^16."""
    weights = torch.tensor((19595, 38470, 7471))
    return ((pixels.to(torch.int64) * weights).sum(3, keepdim=True) + (1 << 15) >> 16).to(torch.uint8)


class _View(NamedTuple):
    """Random numbers for the crop of one sample (none: the center), and whether it is mirrored."""

    numbers: list[float]
    flip: bool


class DecodingFetcher:
    """Decodes, crops and resizes images in a thread pool, prefetching two steps ahead."""

    def __init__(self, reader: EncodedImages, transform: Transform, augment: Augment, options: DecodingOptions) -> None:
        self.labels = reader.labels
        self.skipped: list[str] = []
        self.ahead = _STEPS_AHEAD if options.workers else 0
        self._reader = reader
        self._transform = transform
        self._augment = augment
        self._options = options
        self._decoder = Decoder(reader, options.cache_bytes)
        self._pool = ThreadPoolExecutor(options.workers, "decode") if options.workers else None
        self._fill = torch.tensor([round(255 * mean) for mean in transform.mean], dtype=torch.uint8)
        self._lock = threading.Lock()
        self._bad_rows: set[int] = set()

    @property
    def can_skip_images(self) -> bool:
        """True unless broken images are skipped: then every process must find out which."""
        return self._options.max_bad_samples == 0

    def start(self, rows: Indices, rng: SampleRNG | None, keys: Indices | None = None) -> PendingPixels:
        """Submit the images to the threads; without threads, they are decoded when the returned function is called."""
        keys = rows if keys is None else keys
        height, width = self._transform.height, self._transform.width
        with torch.inference_mode(False):  # the threads write to it, and they are never in that mode
            pixels = torch.empty((len(rows), height, width, 3), dtype=torch.uint8)
            targets = pixels.unbind(0)
        views, numbers = self._views(keys, rng), rows.tolist()
        step = max(1, min(_MAX_CHUNK, len(rows) // max(self._options.workers, 1)))
        chunks = [range(start, min(start + step, len(rows))) for start in range(0, len(rows), step)]

        def decode(chunk: range) -> list[int]:
            errors = self._decoder.decode_all([self._sample(numbers[i], views[i], targets[i]) for i in chunk])
            for position, error in errors.items():
                self._skip(numbers[chunk[position]], error)
            return [i for position, i in enumerate(chunk) if position not in errors]

        if self._pool is None:
            return lambda: self._finish(keys, rng, pixels, [decode(chunk) for chunk in chunks])
        pending: list[Future[list[int]]] = [self._pool.submit(decode, chunk) for chunk in chunks]

        def fetch() -> Fetched:
            wait(pending)  # wake up once for all of them: each wake-up would disturb the threads
            return self._finish(keys, rng, pixels, [future.result() for future in pending])

        return fetch

    def _views(self, keys: Indices, rng: SampleRNG | None) -> list[_View]:
        numbers: list[list[float]] = [[] for _ in keys]
        flips = np.zeros(len(keys), np.bool_)
        if rng is not None and self._augment.crop == "resized":
            numbers = rng.numbers(keys, NUMBERS, "crop").tolist()
        if rng is not None and self._augment.flip != "none":
            flips = rng.flips(keys, self._augment.flip == "alternating")
        return [_View(*view) for view in zip(numbers, flips.tolist(), strict=True)]

    def _sample(self, row: int, view: _View, target: Tensor) -> Sample:
        def choose_box(size: tuple[int, int]) -> Box:
            if not view.numbers:
                return center_box(size, self._transform.crop_fraction)
            objects = self._reader.objects(row)
            if len(objects):
                return draw_box_on(view.numbers, size, self._augment.area, self._augment.aspect, objects)
            return draw_box(view.numbers, size, self._augment.area, self._augment.aspect)

        return Sample(row, choose_box, target, view.flip)

    def _skip(self, row: int, error: DataError) -> None:
        """Record a broken image, or raise if it is one too many."""
        with self._lock:
            if row in self._bad_rows:
                return
            limit = self._options.max_bad_samples
            if len(self._bad_rows) >= limit:
                remedy = "skip broken images with --bad-samples skip"
                if limit:
                    remedy = f"{limit} were skipped already, the most that --bad-samples-limit allows"
                raise DataError(f"{error}; {remedy}") from error
            self._bad_rows.add(row)
            self.skipped.append(str(error))

    def _finish(self, keys: Indices, rng: SampleRNG | None, pixels: Tensor, decoded: list[list[int]]) -> Fetched:
        kept = np.array([position for chunk in decoded for position in chunk], np.int64)
        if len(kept) < len(keys):
            pixels = pixels.index_select(0, torch.from_numpy(kept))
        if self._transform.channels == 1:
            pixels = to_gray(pixels)
        if rng is not None:
            pixels = self._augment.colors(pixels, keys[kept], rng)
            pixels = self._augment.cut(pixels, keys[kept], rng, self._fill)
        return Fetched(pixels, kept)
