"""Pictures that stay encoded (or memory-mapped) until they are needed: decoded, cropped and resized by threads.

What a sample becomes depends on (seed, epoch, sample) and the picture alone, so the number of threads cannot change it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from convolve.data.dataset import Labels
from convolve.data.image_io import Decoder, Reader
from convolve.data.transforms.augment import NUMBERS, Augment, Box, center_box, draw_box, draw_box_on
from convolve.data.transforms.normalize import Transform, fit_channels
from convolve.errors import DataError
from convolve.rng import Indices, SampleRNG

USUAL_PHOTO_SIZE = 224
_MAX_CHUNK = 16
_STEPS_AHEAD = 2
_STATISTICS_SAMPLES = 512


class EncodedSource(Reader, Protocol):
    """Pictures by number, with their labels."""

    @property
    def labels(self) -> Labels:
        """The class of each picture."""

    def __len__(self) -> int: ...

    def objects(self, row: int) -> npt.NDArray[np.float32]:
        """Boxes [K, 4] of objects in it."""

    def take(self, rows: Indices) -> "EncodedSource":
        """Some of the pictures."""


@dataclass(frozen=True)
class EncodedImages:
    """One split of pictures outside memory."""

    source: EncodedSource

    @property
    def labels(self) -> Labels:
        """The class of each picture."""
        return self.source.labels

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Indices) -> "EncodedImages":
        """Some of the pictures."""
        return EncodedImages(self.source.take(rows))


@dataclass(frozen=True)
class DecodingOptions:
    """How pictures are fetched: threads, memory for decoded ones in bytes, and the broken ones that are forgiven."""

    workers: int = 2
    cache_bytes: int = 0
    forgiven: int = 0


class DecodingFetcher:
    """Pictures as pixels of one size, fetched by threads some windows ahead."""

    def __init__(
        self, gallery: EncodedImages, transform: Transform, augment: Augment, service: DecodingOptions
    ) -> None:
        self.labels = gallery.labels
        self.skipped: list[str] = []
        self.ahead = _STEPS_AHEAD if service.workers else 0
        self._source = gallery.source
        self._transform = transform
        self._augment = augment
        self._service = service
        self._decoder = Decoder(gallery.source, service.cache_bytes)
        self._pool = ThreadPoolExecutor(service.workers, "decode") if service.workers else None
        self._fill = torch.tensor([round(255 * mean) for mean in transform.mean], dtype=torch.uint8)
        self._lock = threading.Lock()
        self._bad: dict[int, str] = {}

    def begin(self, rows: Indices, draw: SampleRNG | None) -> Callable[[], tuple[Tensor, Indices]]:
        """Give the pictures to the threads."""
        height, width = self._transform.height, self._transform.width
        with torch.inference_mode(False):  # the threads write to it, and they are never in that mode
            pixels = torch.empty((len(rows), height, width, 3), dtype=torch.uint8)
            targets = pixels.unbind(0)
        views, numbers = self._views(rows, draw), rows.tolist()
        step = max(1, min(_MAX_CHUNK, len(rows) // max(self._service.workers, 1)))
        chunks = [range(start, min(start + step, len(rows))) for start in range(0, len(rows), step)]

        def work(chunk: range) -> list[int]:
            self._decoder.read_ahead(numbers[chunk.start : chunk.stop])
            done = [place for place in chunk if self._fetch(numbers[place], views[place], targets[place])]
            self._decoder.finish()
            return done

        if self._pool is None:
            return lambda: self._finish(rows, draw, pixels, [work(chunk) for chunk in chunks])
        pending: list[Future[list[int]]] = [self._pool.submit(work, chunk) for chunk in chunks]

        def fetch() -> tuple[Tensor, Indices]:
            wait(pending)  # one awakening for all of them: each would disturb the threads
            return self._finish(rows, draw, pixels, [future.result() for future in pending])

        return fetch

    def _views(self, rows: Indices, draw: SampleRNG | None) -> "list[PermutedView]":
        numbers: list[list[float]] = [[] for _ in rows]
        flips = np.zeros(len(rows), np.bool_)
        if draw is not None and self._augment.crop == "resized":
            numbers = draw.numbers(rows, NUMBERS, "crop").tolist()
        if draw is not None and self._augment.flip != "none":
            flips = draw.flips(rows, self._augment.flip == "alternating")
        return [PermutedView(*view) for view in zip(numbers, flips.tolist(), strict=True)]

    def _fetch(self, row: int, view: "PermutedView", target: Tensor) -> bool:
        """Begin to put one picture into its place; False for a broken one that is forgiven."""

        def choose(size: tuple[int, int]) -> Box:
            if not view.numbers:
                return center_box(size, self._transform.crop_share)
            objects = self._source.objects(row)
            if len(objects):
                return draw_box_on(view.numbers, size, self._augment.area, self._augment.aspect, objects)
            return draw_box(view.numbers, size, self._augment.area, self._augment.aspect)

        try:
            self._decoder.begin(row, choose, target, flip=view.flip)
        except DataError as error:
            self._forgive(row, error)
            return False
        return True

    def _forgive(self, row: int, error: DataError) -> None:
        """Take note of a broken picture; one too many is an error."""
        with self._lock:
            if row in self._bad:
                return
            if len(self._bad) >= self._service.forgiven:
                allowed = self._service.forgiven
                rule = f"and {allowed} were left out already, which is all that --bad-samples-limit allows"
                raise DataError(
                    f"{error}; " + (rule if allowed else "leave broken pictures out with --bad-samples skip")
                ) from error
            self._bad[row] = str(error)
            self.skipped.append(str(error))

    def _finish(
        self, rows: Indices, draw: SampleRNG | None, pixels: Tensor, done: list[list[int]]
    ) -> tuple[Tensor, Indices]:
        kept = np.array([place for places in done for place in places], np.int64)
        if len(kept) < len(rows):
            pixels = pixels.index_select(0, torch.from_numpy(kept))
        if draw is not None:
            pixels = self._augment.colors(pixels, rows[kept], draw)
            pixels = self._augment.cut(pixels, rows[kept], draw, self._fill)
        return pixels, kept


class PermutedView(NamedTuple):
    """The random numbers of one sample's crop (none: the center), and whether it is mirrored."""

    numbers: list[float]
    flip: bool


def fit_image_statistics(gallery: EncodedImages, normalization: str, size: int) -> Transform:
    """The transform for pictures of a gallery; `standard` takes its figures from some hundred of them."""
    plain = Transform(size, size, (0.0,) * 3, (1.0,) * 3, size / int(size * 256 / 224))
    images = np.zeros((1, 1, 1, 3), np.uint8)
    if normalization == "standard":
        small = replace(plain, height=64, width=64)
        rows = np.unique(np.linspace(0, len(gallery) - 1, _STATISTICS_SAMPLES).astype(np.int64))
        stock = DecodingFetcher(gallery.take(rows), small, Augment(), DecodingOptions(workers=0, forgiven=len(rows)))
        images = stock.begin(np.arange(len(rows)), None)()[0].numpy()
    mean, std = fit_channels(images, normalization)
    return replace(plain, mean=mean, std=std)
