"""Sample images of each class, stored in a run, which show what the class names mean.

They are the test images that the model recognizes best, as the model sees them: at most three of a class, and 120 in
all. `samples.json` has them as data URLs by class name, so a run that is moved or copied keeps them, and a server reads
no image of a data set:

    {"format": 1, "samples": {"daisy": ["data:image/jpeg;base64,...", ...]}}
"""

import base64
import heapq
import io
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from convolve.data.image_io import Images
from convolve.errors import CheckpointError
from convolve.files import open_run_file, write_file
from convolve.report.calibration import Labels, Logits, softmax
from convolve.run_files import SAMPLES_FILE

PER_CLASS = 3
MAX_SAMPLES = 120
FORMAT = 1
_MAX_FILE = 16 << 20
_LOSSLESS_SIDE = 64
_JPEG_QUALITY = 88
_CHANNELS = (1, 3)
_DATA_URL = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/]{16,}={0,2}", re.ASCII)


@dataclass(frozen=True, order=True)
class _Candidate:
    """An image with the probability of its true class. Of equal ones, the first in the test set is preferred."""

    probability: float
    order: int
    pixels: Images = field(compare=False, repr=False)


class SampleCollector:
    """Collects the images of each class that are recognized best, batch by batch."""

    def __init__(self, classes: tuple[str, ...]) -> None:
        self._classes = classes
        self._per_class = min(PER_CLASS, MAX_SAMPLES // max(len(classes), 1))
        self._heaps: dict[int, list[_Candidate]] = {}
        self._seen = 0

    def select(self, logits: Logits, labels: Labels) -> list[int]:
        """Return the rows of a batch whose images are needed."""
        chosen: dict[int, list[tuple[float, int]]] = {}
        for row, (label, probability) in enumerate(zip(labels.tolist(), _truth(logits, labels), strict=True)):
            heap = self._heaps.get(label, [])
            if len(heap) < self._per_class or (heap and probability > heap[0].probability):
                chosen.setdefault(label, []).append((-probability, row))
        return sorted(row for rows in chosen.values() for _, row in sorted(rows)[: self._per_class])

    def add(self, logits: Logits, labels: Labels, images: Mapping[int, Images]) -> None:
        """Add one batch, with the images of the rows that `select` returned; others are ignored."""
        probabilities = _truth(logits, labels)
        for row in self.select(logits, labels):
            heap = self._heaps.setdefault(int(labels[row]), [])
            push = heapq.heappush if len(heap) < self._per_class else heapq.heappushpop
            push(heap, _Candidate(probabilities[row], -(self._seen + row), images[row]))
        self._seen += len(labels)

    def result(self) -> dict[str, list[Images]]:
        """Return the images [H, W, C] of each class that has any, best first, in class order."""
        return {
            self._classes[label]: [candidate.pixels for candidate in sorted(self._heaps[label], reverse=True)]
            for label in sorted(self._heaps)
        }


def _truth(logits: Logits, labels: Labels) -> list[float]:
    """Return the probability of the true class of each row."""
    probabilities: npt.NDArray[np.float64] = softmax(logits)
    return [float(probability) for probability in probabilities[np.arange(len(labels)), labels]]


def write_samples(folder: Path, samples: Mapping[str, Collection[Images]]) -> None:
    """Store images [H, W, C] by class in a run folder; others than gray and RGB images are skipped."""
    urls = {
        name: [_encode(pixels) for pixels in images if pixels.shape[2] in _CHANNELS] for name, images in samples.items()
    }
    content = {"format": FORMAT, "samples": {name: found for name, found in urls.items() if found}}
    write_file(folder / SAMPLES_FILE, json.dumps(content).encode())


def _encode(pixels: Images) -> str:
    """Return an image as a data URL; a small one keeps every pixel."""
    image, file = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels), io.BytesIO()
    if max(image.size) <= _LOSSLESS_SIDE:
        image.save(file, "PNG", optimize=True)
        kind = "png"
    else:
        image.save(file, "JPEG", quality=_JPEG_QUALITY, optimize=True)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def has_samples(folder: Path) -> bool:
    """Return True if a run folder has sample images, without reading them."""
    return (folder / SAMPLES_FILE).is_file()


def read_samples(folder: Path, classes: Collection[str]) -> dict[str, list[str]]:
    """Return the data URLs of the sample images by class name; empty if the run has none.

    Names that are no class of the model are dropped: a run folder from elsewhere shows nothing but images of classes.
    """
    path = folder / SAMPLES_FILE
    try:
        with open_run_file(path) as file:
            data = file.read(_MAX_FILE + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read ({error.strerror}); check its permissions") from error
    try:
        stored = _parse(data)
        found = {name: list(map(_check_url, urls)) for name, urls in stored.items() if name in classes}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise CheckpointError(f"{path}: damaged; remove it and run `convolve report`") from None
    return {name: found[name][:PER_CLASS] for name in classes if name in found}


def _parse(data: bytes) -> dict[str, list[object]]:
    if len(data) > _MAX_FILE:
        raise ValueError(f"more than {_MAX_FILE} bytes")
    stored: dict[str, list[object]] = json.loads(data)["samples"]
    return stored


def _check_url(url: object) -> str:
    if not isinstance(url, str) or not _DATA_URL.fullmatch(url):
        raise ValueError("not the data URL of an image")
    return url
