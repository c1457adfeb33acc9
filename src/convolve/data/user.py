"""Data sets of the user's code: read by index in the order of the run, by worker processes if requested.

An item depends only on its key (`items.py`). An exception of an item passes unchanged, with a note that names its
index.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from convolve import rng as keyed
from convolve.data.dataset import Dataset, Images, Labels, Reader, Task
from convolve.data.items import (
    Item,
    KeyedDataset,
    MapDataset,
    SampleFailure,
    Target,
    UserDataset,
    check_target,
    choose_task,
    name_of,
    read_items,
)
from convolve.data.loader.decoding import DecodingOptions
from convolve.data.loader.in_memory import InMemoryFetcher, InMemoryImages
from convolve.data.loader.loader import Fetched
from convolve.data.transforms.augment import NO_AUGMENT, Augment
from convolve.data.transforms.normalize import KEEP_VALUES, Transform, fit_channels
from convolve.errors import ConfigError, ConvolveError, DataError
from convolve.rng import Indices, SampleRNG

STATISTICS_SAMPLES = 512
TEST_FRACTION = 0.1
STEPS_AHEAD = 2


_worker_data: UserDataset | None = None


def _start_worker(data: UserDataset) -> None:
    global _worker_data
    torch.set_num_threads(1)
    _worker_data = data
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()


def _follow_parent(parent: int) -> None:
    """End this process when the one that reads from it is gone: nothing else would end it after a kill."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _work(rows: list[int], key: SampleRNG | None, numbers: list[int]) -> list[tuple[Tensor, Target] | SampleFailure]:
    assert _worker_data is not None, "the pool starts its workers with the data set"
    found: list[tuple[Tensor, Target] | SampleFailure] = []
    for item in read_items(_worker_data, rows, key, numbers):
        # A tensor crosses in shared memory.
        found.append(item if isinstance(item, SampleFailure) else (torch.from_numpy(item[0]), item[1]))
    return found


_pools: "weakref.WeakSet[ProcessPoolExecutor]" = weakref.WeakSet()


def close_workers() -> None:
    """End the worker processes of all data sets."""
    for pool in list(_pools):
        pool.shutdown(wait=True, cancel_futures=True)
        _pools.discard(pool)


@dataclass(frozen=True)
class UserReader:
    """A reader of the user's data set; all images have the same shape. Labels are known when an item is read.

    `outputs` is the length of targets that are vectors; 0 if they are class numbers.
    """

    data: UserDataset
    rows: Indices
    image_shape: tuple[int, int, int]
    floats: bool
    task: Task = "single-label"
    outputs: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Labels:
        """Class numbers that the data set lists in an attribute `targets`; -1 if it has none."""
        known = getattr(self.data, "targets", None)
        listed = isinstance(known, Sequence | np.ndarray | Tensor) and len(known) == len(self.data)
        if known is None or not listed or self.outputs:
            return np.full(len(self.rows), -1, np.int64)
        return np.asarray(known).astype(np.int64)[self.rows]

    def take(self, rows: Indices) -> "UserReader":
        return replace(self, rows=self.rows[rows])

    def fit_transform(self, normalization: str, size: int | None = None, photo_size: int | None = None) -> Transform:
        height, width, channels = self.image_shape
        if self.floats:
            if size is not None and (height, width) != (size, size):
                raise ConfigError(f"--image-size {size}: float images of {height} x {width} stay as they are; omit it")
            return Transform(height, width, (0.0,) * channels, (KEEP_VALUES,) * channels)
        images: Images = np.zeros((1, 1, 1, channels), np.uint8)
        if normalization == "standard":
            chosen = np.unique(np.linspace(0, len(self) - 1, STATISTICS_SAMPLES).astype(np.int64))
            fetcher = self.fetcher(Transform(height, width, (0.0,) * channels, (1.0,) * channels), NO_AUGMENT)
            images = fetcher.start(chosen, None)().pixels.numpy()
        mean, std = fit_channels(images, normalization)
        return Transform(size or height, size or width, mean, std)

    def fetcher(
        self,
        transform: Transform,
        augment: Augment,
        device: torch.device | None = None,
        options: DecodingOptions | None = None,
    ) -> "UserFetcher":
        return UserFetcher(self, transform, augment, options or DecodingOptions(workers=0))


class UserFetcher:
    """Reads items in this process, or in worker processes two steps ahead; uint8 images are augmented afterwards."""

    def __init__(self, reader: UserReader, transform: Transform, augment: Augment, options: DecodingOptions) -> None:
        self.labels = reader.labels
        self.skipped: list[str] = []
        self.ahead = STEPS_AHEAD if options.workers else 0
        self._reader = reader
        self._name = type(reader.data).__qualname__
        self._transform = transform
        self._augment = augment
        self._options = options
        self._pool: ProcessPoolExecutor | None = None
        self._bad: set[int] = set()

    @property
    def can_skip_images(self) -> bool:
        """False: an item has the image and the label."""
        return False

    def start(self, rows: Indices, rng: SampleRNG | None, keys: Indices | None = None) -> Callable[[], Fetched]:
        indices = self._reader.rows[rows].tolist()
        keys = rows if keys is None else keys
        # The item's index, unless it is drawn again in an epoch.
        again = (keys // len(self._reader)) * len(self._reader.data)
        numbers = (self._reader.rows[rows] + again).tolist()
        if not self._options.workers:
            return lambda: self._finish(rows, rng, read_items(self._reader.data, indices, rng, numbers), keys)
        count = self._options.workers
        size = -(-len(indices) // count)
        chunks = [slice(first, first + size) for first in range(0, len(indices), size)]
        pool = self._open_pool()
        pending = [pool.submit(_work, indices[chunk], rng, numbers[chunk]) for chunk in chunks]
        return lambda: self._finish(rows, rng, self._collect(pending), keys)

    def _open_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Workers start as those of torch's DataLoader do.
            context = multiprocessing.get_context()
            self._pool = ProcessPoolExecutor(
                self._options.workers, mp_context=context, initializer=_start_worker, initargs=(self._reader.data,)
            )
            _pools.add(self._pool)
        return self._pool

    def _collect(
        self, pending: "list[Future[list[tuple[Tensor, Target] | SampleFailure]]]"
    ) -> list[Item | SampleFailure]:
        items: list[Item | SampleFailure] = []
        try:
            for future in pending:
                for item in future.result():
                    items.append(item if isinstance(item, SampleFailure) else (item[0].numpy(), item[1]))
        except BrokenProcessPool:
            raise DataError(
                f"data set {self._name}: a worker process died; look above for its reason, or set workers to 0"
            ) from None
        return items

    def _finish(
        self, rows: Indices, rng: SampleRNG | None, items: Sequence[Item | SampleFailure], keys: Indices
    ) -> Fetched:
        kept, images, labels = [], [], []
        for position, item in enumerate(items):
            if isinstance(item, SampleFailure):
                self._skip(item)
                continue
            index = int(self._reader.rows[rows[position]])
            self._check_shape(item[0], index)
            sample = f"data set {self._name}: sample {index}"
            check_target(item[1], self._reader.task, self._reader.outputs, sample)
            kept.append(position)
            images.append(item[0])
            labels.append(item[1])
        height, width, channels = self._reader.image_shape
        empty = np.empty((0, height, width, channels), np.float32 if self._reader.floats else np.uint8)
        stacked, indices = np.stack(images) if images else empty, np.array(kept, np.int64)
        pixels = torch.from_numpy(stacked)
        if not self._reader.floats and images:
            batch = InMemoryImages(stacked, np.zeros(len(stacked), np.int64))
            augmented = InMemoryFetcher(batch, self._transform, pixels.device, self._augment)
            pixels = augmented.fetch(np.arange(len(batch)), rng, keys[indices])
        return Fetched(pixels, indices, self._join(labels))

    def _join(self, targets: list[Target]) -> Tensor:
        """Return class numbers [N], or vectors [N, classes]."""
        if not self._reader.outputs:
            return torch.tensor(targets, dtype=torch.int64)
        empty = np.empty((0, self._reader.outputs), np.float32)
        return torch.from_numpy(np.stack(targets).astype(np.float32) if targets else empty)

    def _check_shape(self, pixels: npt.NDArray[Any], index: int) -> None:
        if pixels.shape != self._reader.image_shape or (pixels.dtype != np.uint8) != self._reader.floats:
            expected = " x ".join(map(str, self._reader.image_shape))
            raise DataError(
                f"data set {self._name}: image of sample {index} is {' x '.join(map(str, pixels.shape))} "
                f"{pixels.dtype}, sample 0 is {expected}; return images of one size and type"
            )

    def _skip(self, failure: SampleFailure) -> None:
        """Count a failed item as skipped if that is allowed, else raise its exception."""
        if failure.index in self._bad:
            return
        if len(self._bad) < self._options.max_bad_samples:
            self._bad.add(failure.index)
            self.skipped.append(f"sample {failure.index}: {type(failure.error).__name__}: {failure.error}")
            return
        raise note_sample(failure, self._name)


def note_sample(failure: SampleFailure, name: str) -> BaseException:
    """Return the exception of an item with a note that names the item."""
    error, note = failure.error, f"raised by sample {failure.index} of data set {name}"
    if isinstance(error, ConvolveError):
        return error
    if sys.version_info >= (3, 11):
        error.add_note(note)
    return error


def open_user_data(source: Any, *, classes: Sequence[str] | None = None, outputs: int | None = None) -> Dataset[Reader]:
    """Return the user's data set, or a pair for training and testing, as a `Dataset`.

    A single data set is divided: a tenth of it, chosen by a fixed permutation, is for testing. The class names are
    `classes`, or those of the data set; otherwise their number is `outputs`, or follows from all labels.
    """
    if isinstance(source, tuple):
        if len(source) != 2:
            raise DataError(f"data: a tuple of {len(source)}; give one data set, or (train, test)")
        train, test = (_open_split(part) for part in source)
    else:
        whole = _open_split(source)
        if len(whole) < 2:
            raise DataError(f"data set {type(source).__qualname__}: has {len(whole)} samples; give at least 2")
        order = keyed.epoch_permutation(0, 0, len(whole))
        held = max(1, round(TEST_FRACTION * len(whole)))
        train, test = whole.take(np.sort(order[held:])), whole.take(np.sort(order[:held]))
    if (train.image_shape, train.floats) != (test.image_shape, test.floats):
        raise DataError(
            f"data: training images are {train.image_shape}, test images {test.image_shape}; make them the same"
        )
    if (train.task, train.outputs) != (test.task, test.outputs):
        raise DataError("data: targets of the training and the test data are of different kinds; make them the same")
    names = tuple(classes or getattr(train.data, "classes", None) or ()) or _number_classes(train, outputs)
    if train.outputs not in (0, len(names)):
        raise DataError(
            f"data set {type(train.data).__qualname__}: {len(names)} classes, but targets of {train.outputs} numbers; "
            "return one number for each class"
        )
    return Dataset(name_of(train.data), train, test, tuple(map(str, names)), "the user's code", task=train.task)


def set_task(dataset: Dataset[Reader], task: str) -> Dataset[Reader]:
    """Return the user's data set with the task of the option `task`: a vector may mean labels or probabilities."""
    train, test = dataset.train, dataset.test
    if task in ("auto", dataset.task) or not isinstance(train, UserReader) or not isinstance(test, UserReader):
        return dataset
    if "single-label" in (task, dataset.task):
        raise DataError(f"--task {task}: targets of {dataset.name} are {dataset.task}; omit it, or return others")
    chosen: Task = "multi-label" if task == "multi-label" else "soft-label"
    return replace(dataset, task=chosen, train=replace(train, task=chosen), test=replace(test, task=chosen))


def _open_split(data: Any) -> UserReader:
    name = type(data).__qualname__
    if isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__len__"):
        raise DataError(f"data set {name}: has no length and no index, so no order; give a data set with both")
    if not isinstance(data, MapDataset | KeyedDataset):
        raise DataError(f"data set {name}: no data set; define __len__ and __getitem__, or sample(index, rng)")
    if len(data) < 1:
        raise DataError(f"data set {name}: is empty; give at least one sample")
    [first] = read_items(data, [0], None)
    if isinstance(first, SampleFailure):
        raise note_sample(first, name)
    (height, width, channels), target = first[0].shape, first[1]
    outputs = 0 if isinstance(target, int) else len(target)
    shape, floats = (height, width, channels), first[0].dtype != np.uint8
    return UserReader(data, np.arange(len(data)), shape, floats, choose_task(target), outputs)


def _number_classes(train: UserReader, outputs: int | None) -> tuple[str, ...]:
    """Return the classes as numbers: as many as the model or a target has, else up to the highest label."""
    outputs = train.outputs or outputs
    if outputs is None:
        known = next((getattr(train.data, key) for key in ("targets", "labels") if hasattr(train.data, key)), None)
        if known is not None:
            labels = np.asarray(known).reshape(-1)
        else:
            items = read_items(train.data, train.rows.tolist(), None)
            labels = np.array([item[1] for item in items if not isinstance(item, SampleFailure)])
        outputs = int(labels.max()) + 1
    return tuple(map(str, range(outputs)))


def find_own_state(reader: UserReader, seed: int, count: int = 2) -> int | None:
    """Return the first of some samples that differs when it is read twice with one key, None if all agree."""
    order = keyed.epoch_permutation(seed, 0, len(reader))[:count]
    indices = reader.rows[order].tolist()
    readings = (read_items(reader.data, indices, SampleRNG(seed, 0)) for _ in range(2))
    for index, first, second in zip(indices, *readings, strict=True):
        if isinstance(first, SampleFailure) or isinstance(second, SampleFailure):
            continue
        if not all(np.array_equal(one, two) for one, two in zip(first, second, strict=True)):
            return int(index)
    return None
