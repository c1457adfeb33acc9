"""Occlusion: the image regions that a prediction depends on, for any engine (Zeiler and Fergus, arXiv 1311.2901).

The arithmetic: y(x) is the logit of the class for the image x. A window of a quarter of the height and width moves over
a grid of 8 x 8 positions p; in x_p the window has the median color of the image. The heatmap at p is
max(y(x) - y(x_p), 0), interpolated to the size of the image and scaled to 0..1. It needs no gradient, so it works for
exported files as well, and costs 65 forward passes for each image.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image

from convolve.data.image_io import Images
from convolve.inference.overlay import Heatmaps

GRID = 8
_WINDOW = 1 / 4
_BATCH = 16
LogitsFn = Callable[[Images], npt.NDArray[np.float32]]


def occlusion(run: LogitsFn, images: Images, classes: npt.NDArray[np.int64]) -> Heatmaps:
    """Return heatmaps [N, H, W] in 0..1 for images [N, H, W, C] and one class index for each; `run` returns logits."""
    heatmaps = [_heatmap(run, image, int(label)) for image, label in zip(images, classes, strict=True)]
    return np.stack(heatmaps) if heatmaps else np.zeros(images.shape[:3], np.float32)


def _heatmap(run: LogitsFn, image: Images, label: int) -> Heatmaps:
    color = np.median(image, axis=(0, 1)).astype(np.uint8)
    rows, columns = ([_window(position, side) for position in range(GRID)] for side in image.shape[:2])
    windows = [(row, column) for row in rows for column in columns]
    covered = np.stack([image, *(_cover(image, window, color) for window in windows)])
    starts = range(0, len(covered), _BATCH)
    logits = np.concatenate([run(covered[start : start + _BATCH])[:, label] for start in starts])
    drops = np.maximum(logits[0] - logits[1:], 0).reshape(GRID, GRID).astype(np.float32)
    drops /= max(float(drops.max()), 1e-12)
    size = (image.shape[1], image.shape[0])
    return np.clip(np.asarray(Image.fromarray(drops).resize(size, Image.Resampling.BICUBIC), np.float32), 0, 1)


def _cover(image: Images, window: tuple[slice, slice], color: Images) -> Images:
    covered = image.copy()
    covered[window] = color
    return covered


def _window(position: int, side: int) -> slice:
    """Return the pixels of a window along one side, at least one; the first and the last are cut off by the edge."""
    center, half = (position + 0.5) * side / GRID, _WINDOW * side / 2
    return slice(max(round(center - half), 0), max(round(center + half), round(center - half) + 1))
