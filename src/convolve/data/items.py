"""Items of a user's data set: an image and its target, read with every random generator keyed by the item.

Before each item, the generators of `random`, numpy and torch are seeded by (seed, epoch, sample), so an item that draws
from them is the same in any number of workers, replicas and micro batches, and after a restart. A data set with a
method `sample(index, rng)` receives a numpy generator of the same key instead; None in validation.

A target is the number of a class, or a vector: integers 0 and 1 for several labels, floats for a probability of each
class.
"""

import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from convolve import rng as keyed
from convolve.data.dataset import Task
from convolve.errors import DataError
from convolve.rng import SampleRNG


@runtime_checkable
class MapDataset(Protocol):
    """A data set of torch, torchvision or Hugging Face: items are (image, label) or {"image": ..., "label": ...}."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class KeyedDataset(Protocol):
    """A data set whose items draw from a given generator."""

    def __len__(self) -> int: ...

    def sample(self, index: int, rng: np.random.Generator | None, /) -> Any:
        """Return one item; `rng` belongs to (seed, epoch, sample), and is None in validation."""


UserDataset: TypeAlias = MapDataset | KeyedDataset
SUM_TOLERANCE = 1e-3
Target = int | npt.NDArray[Any]
Item = tuple[npt.NDArray[Any], Target]


def name_of(data: object) -> str:
    """Return the name of a data set as `module:class`."""
    return f"{type(data).__module__}:{type(data).__qualname__}"


def read_item(data: UserDataset, index: int, key: SampleRNG | None, number: int | None = None) -> Item:
    """Return pixels [H, W, C], uint8 or float32, and the target of one item, with all generators seeded by its key.

    `number` replaces the index in the key, for an item that is drawn several times in an epoch.
    """
    number = index if number is None else number
    parts = ("user test sample", index) if key is None else (key.seed, "user sample", key.epoch, number)
    seed = keyed.hash_key(*parts)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)
    if isinstance(data, KeyedDataset):
        item = data.sample(index, None if key is None else keyed.generator(*parts))
    else:
        item = data[index]
    return _unpack(item, type(data).__qualname__, index)


def _unpack(item: Any, name: str, index: int) -> Item:
    image: Any
    label: Any
    if isinstance(item, dict) and {"image", "label"} <= set(item):
        image, label = item["image"], item["label"]
    elif isinstance(item, tuple | list) and len(item) == 2:
        image, label = item
    else:
        raise DataError(
            f"data set {name}: sample {index} is {type(item).__name__}; return (image, label) or a dict with both"
        )
    return _to_pixels(image, name, index), _to_target(label, name, index)


def _to_target(label: Any, name: str, index: int) -> Target:
    if isinstance(label, Tensor):
        label = label.detach().cpu().numpy()
    if isinstance(label, np.ndarray) and label.ndim == 0:
        label = label.item()
    if isinstance(label, list | tuple | np.ndarray):
        vector = np.asarray(label)
        if vector.ndim == 1 and len(vector) and vector.dtype.kind in "biuf":
            return vector.astype(np.float32 if vector.dtype.kind == "f" else np.int64)
    if isinstance(label, bool) or not isinstance(label, int | np.integer) or label < 0:
        raise DataError(
            f"data set {name}: sample {index} has the label {label!r}; return the number of its class, or a vector "
            "with a number for each class"
        )
    return int(label)


def choose_task(target: Target) -> Task:
    """Return what a target means: a class number, labels as integers 0 and 1, or probabilities as floats."""
    if isinstance(target, int):
        return "single-label"
    return "soft-label" if target.dtype.kind == "f" else "multi-label"


def check_target(target: Target, task: Task, classes: int, sample: str) -> None:
    """Reject a target that does not fit the task; `sample` names it."""
    if isinstance(target, int) or task == "single-label":
        if not isinstance(target, int) or task != "single-label":
            found = "one class" if isinstance(target, int) else f"a vector of {len(target)}"
            raise DataError(f"{sample} has {found}, others are {task}; return targets of one kind")
        return
    if len(target) != classes:
        raise DataError(f"{sample} has a vector of {len(target)} for {classes} classes; return one number for each")
    if task == "multi-label" and not np.isin(target, (0, 1)).all():
        raise DataError(f"{sample} has labels other than 0 and 1; return 1 for each label that the image has")
    if task == "soft-label" and not (np.isfinite(target).all() and (target >= 0).all()):
        raise DataError(f"{sample} has a probability that is negative or not finite; return numbers in [0, 1]")
    if task == "soft-label" and abs(float(target.sum()) - 1) > SUM_TOLERANCE:
        raise DataError(
            f"{sample} has probabilities with the sum {float(target.sum()):.4g}; make it 1, or for several labels per "
            "image return integers or set task to multi-label"
        )


def _to_pixels(image: Any, name: str, index: int) -> npt.NDArray[Any]:
    if isinstance(image, Image.Image):
        gray = image.mode in ("1", "L", "I", "I;16", "F")
        image = np.array(image.convert("L" if gray else "RGB"))
    if isinstance(image, Tensor):
        image = image.detach().cpu().numpy()
    if not isinstance(image, np.ndarray) or image.ndim not in (2, 3) or 0 in image.shape:
        shape = getattr(image, "shape", type(image).__name__)
        raise DataError(
            f"data set {name}: image of sample {index} is {shape}; return an image, uint8 [H, W, C] or float [C, H, W]"
        )
    if image.dtype == np.uint8:
        return image[..., None] if image.ndim == 2 else image
    if np.issubdtype(image.dtype, np.floating):
        channels_first = image[None] if image.ndim == 2 else image
        return np.ascontiguousarray(channels_first.transpose(1, 2, 0), dtype=np.float32)
    raise DataError(f"data set {name}: image of sample {index} is {image.dtype}; return uint8 or floating point")


class SampleFailure(Exception):
    """Carries the exception of one item from a worker."""

    def __init__(self, index: int, error: BaseException) -> None:
        super().__init__(index, error)
        self.index = index
        self.error = error


def read_items(
    data: UserDataset, rows: Sequence[int], key: SampleRNG | None, numbers: Sequence[int] | None = None
) -> list[Item | SampleFailure]:
    """Read items one after the other; the global generators are afterwards as before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    items: list[Item | SampleFailure] = []
    try:
        for index, number in zip(rows, rows if numbers is None else numbers, strict=True):
            try:
                items.append(read_item(data, index, key, number))
            except Exception as error:
                items.append(SampleFailure(index, error))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
    return items
