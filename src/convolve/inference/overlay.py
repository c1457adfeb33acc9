"""Heatmaps and model inputs as PNG images."""

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from convolve.data.image_io import Images

Heatmaps = npt.NDArray[np.float32]
_COLORMAP = np.array([(0, 0, 96), (0, 96, 255), (64, 255, 160), (255, 220, 0), (255, 32, 0)], np.float64)
_VISIBLE_SIDE = 224


def overlay_png(pixels: Images, heatmap: Heatmaps) -> bytes:
    """Return an image [H, W, C] with its heatmap on top, as a PNG."""
    position = np.clip(heatmap, 0, 1)[..., None] * (len(_COLORMAP) - 1)
    index = np.minimum(position.astype(np.int64), len(_COLORMAP) - 2)
    low, high = _COLORMAP[index[..., 0]], _COLORMAP[index[..., 0] + 1]
    colors = low + (high - low) * (position - index)
    weight = 0.15 + 0.45 * np.clip(heatmap, 0, 1)[..., None]
    mixed = np.broadcast_to(visible(pixels), (*pixels.shape[:2], 3)) * (1 - weight) + colors * weight
    return _to_png(np.clip(np.rint(mixed), 0, 255).astype(np.uint8))


def input_png(pixels: Images) -> bytes:
    """Return a model input [H, W, C] as a PNG."""
    shown = visible(pixels)
    return _to_png(shown[..., 0] if shown.shape[2] == 1 else shown)


def visible(pixels: Images) -> Images:
    """Return the channels that can be shown: the first three, or the first."""
    return pixels[..., :3] if pixels.shape[2] >= 3 else pixels[..., :1]


def _to_png(pixels: Images) -> bytes:
    """Encode pixels, enlarging small images by a whole factor."""
    image = Image.fromarray(pixels)
    factor = max(1, _VISIBLE_SIDE // max(image.size))
    file = io.BytesIO()
    image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()
