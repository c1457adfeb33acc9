"""Features of images: the input of the classifier of a frozen model in evaluation mode.

Every pass has the same number of images, so an image has the same features in any order and after a restart. Features
are cached by the content of the image (`cache.py`).
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from convolve.data.build import DataModule, decoding_options
from convolve.data.dataset import Labels, Reader
from convolve.data.loader.decoding import EncodedImages
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.loader.loader import PendingPixels
from convolve.data.transforms.augment import NO_AUGMENT
from convolve.download import Progress
from convolve.engine.evaluate import fold_for_inference
from convolve.errors import ConfigError
from convolve.layers.fused import fuse_activations
from convolve.models.network import Network
from convolve.rng import Indices
from convolve.transfer.cache import FeatureArray, FeatureCache, cache_key, digest_of, features_folder

PASS = 8  # images of one forward pass: few, so activations stay in the processor's cache
FETCH = 64  # images decoded in advance
_VERSION = 1  # of decoding and computation; a change makes cached features invalid


@dataclass(frozen=True)
class Features:
    """Features [N, width] and labels [N] of the readable images of a split, and their rows in the reader."""

    values: Tensor
    labels: Labels
    rows: Indices


def find_classifier(model: Network) -> tuple[str, nn.Linear]:
    """Return the last block of a model and its name; it must be a linear layer."""
    name, block = list(model.blocks.items())[-1]
    if not isinstance(block, nn.Linear):
        raise ConfigError(
            f"--fit-head: the last block of the model, {name}, is not a linear layer; use another --model"
        )
    return name, block


class FeatureExtractor:
    """Computes features of images with one model and one preprocessing."""

    def __init__(self, model: Network, data: DataModule, progress: Progress) -> None:
        name, classifier = find_classifier(model)
        self._data = data
        self._progress = progress
        self._blocks = _backbone(model, name)
        self.width = classifier.in_features
        weights = {key: value.cpu().numpy() for key, value in model.state_dict().items() if not _in_block(key, name)}
        key = cache_key(
            weights=digest_of(weights),
            transform=data.transform.to_json(),
            version=_VERSION,
            torch=torch.__version__,
            device=data.device.type,
        )
        self._cache = FeatureCache(features_folder() / f"{key}.bin", self.width)

    def compute(self, reader: Reader, task: str = "features") -> Features:
        """Return the features of all images of a reader; those in the cache are not computed again."""
        digests = [_digest(reader, row) for row in range(len(reader))]
        values = np.zeros((len(reader), self.width), np.float32)
        known = self._cache.fill(digests, values)
        for computed, features in self.stream(reader, np.flatnonzero(~known), task):
            self._cache.append([digests[row] for row in computed.tolist()], features)
            values[computed], known[computed] = features, True
        rows = np.flatnonzero(known)
        # Selecting all rows would hold the features twice.
        return Features(torch.from_numpy(values if known.all() else values[rows]), reader.labels[rows], rows)

    def stream(self, reader: Reader, rows: Indices, task: str) -> Iterator[tuple[Indices, FeatureArray]]:
        """Yield the rows that could be read, with their features; images are decoded in advance by threads."""
        data = self._data
        options = decoding_options(data.options, len(reader))
        fetcher = reader.fetcher(data.transform, NO_AUGMENT, torch.device("cpu"), options)
        pending: deque[tuple[Indices, PendingPixels]] = deque()
        done = 0
        for start in range(0, len(rows), FETCH):
            chunk = rows[start : start + FETCH]
            pending.append((chunk, fetcher.start(chunk, None)))
            if len(pending) > fetcher.ahead:
                yield self._finish(*pending.popleft())
                done += FETCH
                self._progress(task, done, len(rows))
        while pending:
            yield self._finish(*pending.popleft())
        self._progress(task, len(rows), len(rows))

    def _finish(self, rows: Indices, fetch: PendingPixels) -> tuple[Indices, FeatureArray]:
        pixels, kept, _ = fetch()
        values = [self.run_pass(part) for part in torch.split(pixels, PASS)]
        return rows[kept], torch.cat(values).numpy() if values else np.empty((0, self.width), np.float32)

    def run_pass(self, pixels: Tensor) -> Tensor:
        """Return the features of at most `PASS` images, from pixels [N, H, W, C]."""
        count = len(pixels)
        padded = torch.cat((pixels, pixels.new_zeros(PASS - count, *pixels.shape[1:]))) if count < PASS else pixels
        with torch.inference_mode():
            images = self._data.transform(padded.to(self._data.device))
            return self._blocks(images)[:count].cpu()


def _backbone(model: Network, classifier: str) -> Callable[[Tensor], Tensor]:
    folded = fuse_activations(fold_for_inference(model))
    blocks = [block for name, block in folded.blocks.items() if name != classifier]

    def run(images: Tensor) -> Tensor:
        for block in blocks:
            images = block(images)
        return images

    return run


def _in_block(key: str, block: str) -> bool:
    return key.startswith(f"{block.replace('/', '.')}.")


def _digest(reader: Reader, row: int) -> bytes:
    if isinstance(reader, EncodedImages):
        content = reader.read(row)
        return hashlib.sha256(content if isinstance(content, bytes) else np.ascontiguousarray(content).data).digest()
    if not isinstance(reader, InMemoryImages):
        raise ConfigError("--fit-head: features are stored by the contents of files; omit it with a data set in Python")
    return hashlib.sha256(np.ascontiguousarray(reader.images[row]).data).digest()
