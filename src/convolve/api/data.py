"""`convolve.data`: list, fetch, check, prepare and open data sets, and the loader for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from convolve.api.progress import open_progress
from convolve.api.session import session
from convolve.api.user_code import Source, locate, take_objects
from convolve.data.loader.loader import WHOLE, MicroBatch, ReplicaShard, StepBatch
from convolve.errors import ConfigError
from convolve.loggers.base import Console

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from convolve.config.options import DataOptions
    from convolve.data.build import DataModule
    from convolve.data.check import DataReport, DatasetListing, FetchReport
    from convolve.data.dataset import Dataset, Reader
    from convolve.data.prepare import Prepared
    from convolve.runs.data_check import CleanReport

Format = Literal["webdataset", "raw"]
AnyT = TypeVar("AnyT")


def list() -> tuple[DatasetListing, ...]:
    """Return the known data sets with their location, size and license."""
    from convolve.data.check import list_datasets

    return tuple(list_datasets())


def get(name: str, *, progress: bool | Console | None = None) -> FetchReport:
    """Fetch a known data set into the cache, and verify it."""
    with session(), open_progress(progress) as console:
        from convolve.data.check import fetch_dataset

        return fetch_dataset(name, progress=console.progress)


def check(source: str | Path, *, progress: bool | Console | None = None) -> DataReport:
    """Check every image of a data set or folder; the report lists issues."""
    with session(), open_progress(progress) as console:
        from convolve.data.check import check_data

        return check_data(str(source), announce=console.info, progress=console.progress)


def clean(
    folder: str | Path,
    *,
    move: str | Path | None = None,
    kinds: Sequence[str] = ("broken", "not-images", "duplicates"),
    weights: str | None = "imagenet",
    progress: bool | Console | None = None,
) -> CleanReport:
    """Find broken files, duplicates and likely wrong labels in a folder of photos, and move files on request.

    Args:
        move: folder to move them to; nothing is deleted. By default nothing is moved.
        kinds: what to move: broken, not-images, duplicates, near-duplicates, wrong-labels.
        weights: published weights that judge the labels; None does not check labels.
    """
    with session(), open_progress(progress) as console:
        from convolve.runs.data_check import clean as clean_folder

        target = None if move is None else Path(move)
        return clean_folder(Path(folder), console, move=target, kinds=kinds, weights=weights)


def prepare(
    source: str | Path,
    target: str | Path,
    *,
    format: Format = "webdataset",
    image_size: int | None = None,
    quality: int = 95,
    shard_samples: int = 1000,
    workers: int | None = None,
) -> Prepared:
    """Store the images of a folder in a faster format: tar shards, or raw pixels."""
    with session(), open_progress(None) as console:
        from convolve.data.prepare import PrepareOptions, prepare_images

        for flag, value, low, high in (
            ("--image-size", image_size, 1, 4096),
            ("--quality", quality, 1, 100),
            ("--shard-samples", shard_samples, 1, 1_000_000),
        ):
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{flag} {value}: must be {low} to {high}")
        how = PrepareOptions(format, image_size, quality, shard_samples)
        return prepare_images(Path(source), Path(target), how, workers, console.progress)


def open(source: Source, *, classes: Sequence[str] | None = None, **options: Unpack[DataOptions]) -> Dataset[Reader]:
    """Open a data set by name, folder or object. It has `name`, `train`, `test` and `classes`.

    Args:
        classes: names of the classes of a data set object; needed if it does not have them.
    """
    with session():
        return _open(source, classes, dict(options)).dataset


def _open(source: Source, classes: Sequence[str] | None, options: dict[str, Any], device: str = "cpu") -> DataModule:
    from convolve.config.loading import build
    from convolve.engine.build import open_data
    from convolve.engine.user_code import NO_USER_CODE
    from convolve.loggers.base import SilentConsole

    place = locate(source)
    user = take_objects(options, NO_USER_CODE)
    if place.is_object:
        from convolve.data.user import open_user_data

        user = replace(user, data=open_user_data(source, classes=classes))
        options.setdefault("workers", 0)
    elif classes is not None:
        raise ConfigError("classes: only for data set objects; omit it")
    named = {"dataset": place.name, "data_dir": place.folder}
    config = build({**options, **{key: value for key, value in named.items() if value is not None}, "device": device})
    return open_data(config, SilentConsole(), user)


def register(name: str) -> Callable[[AnyT], AnyT]:
    """Return a decorator that gives a function a name for `train`; it returns a data set, or a pair of them."""
    from convolve import plugins

    return plugins.DATASETS.decorator(name)


class Feed:
    """Batches of a data set in the order of a run: keyed by seed and position, so a loop can resume anywhere."""

    def __init__(self, data: DataModule, batch_size: int, global_batch: int, seed: int) -> None:
        self.classes = data.dataset.classes
        self.input_shape = data.transform.shape
        self._train = data.train_loader()
        self._test = data.test_loader()
        self._sizes = (batch_size, global_batch)
        self._seed = seed

    def __len__(self) -> int:
        """Return the number of training samples of an epoch."""
        return len(self._train)

    def steps(self, position: int = 0, shard: ReplicaShard = WHOLE) -> Iterator[StepBatch]:
        """Yield the global batches from a position in samples on, without end; `shard` selects those of a replica."""
        return self._train.step_batches(self._seed, position, *self._sizes, shard)

    def batches(self, size: int = 500, shard: ReplicaShard = WHOLE) -> Iterator[MicroBatch]:
        """Yield every test sample once."""
        return self._test.batches(size, shard)


def loader(
    data: Source,
    *,
    batch_size: int = 64,
    global_batch: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    **options: Unpack[DataOptions],
) -> Feed:
    """Return the batches of a data set for a training loop of your own, normalized and augmented as in `train`.

    Args:
        batch_size: samples of a micro batch.
        global_batch: samples of a step [one micro batch].
    """
    total = batch_size if global_batch is None else global_batch
    if batch_size < 1 or total % batch_size:
        raise ConfigError(f"global_batch={total}: must be a multiple of batch_size={batch_size}")
    with session():
        return Feed(_open(data, None, dict(options), device), batch_size, total, seed)
