"""Grad-CAM: the image regions that support a prediction (Selvaraju et al., arXiv 1610.02391, section 3).

The arithmetic: A are the activations of the last block with more than one position, y the logit of the class. The
weight of a channel is w = mean over positions of dy/dA. The heatmap is ReLU(sum over channels of w A), scaled to 0..1.
"""

import io

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from convolve.data.dataset import Images
from convolve.models.network import Network

Heatmaps = npt.NDArray[np.float32]
_COLORMAP = np.array([(0, 0, 96), (0, 96, 255), (64, 255, 160), (255, 220, 0), (255, 32, 0)], np.float64)
_VISIBLE_SIDE = 224


def grad_cam(model: Network, images: Tensor, classes: Tensor) -> Heatmaps:
    """Return heatmaps [N, H, W] in 0..1 for normalized images [N, C, H, W] and one class index for each."""
    size = (images.shape[2], images.shape[3])
    with torch.inference_mode(False), torch.enable_grad():
        activations, logits = _forward(model, images.clone())
        (gradients,) = torch.autograd.grad(logits.gather(1, classes.view(-1, 1)).sum(), activations)
    weights = gradients.mean(dim=(2, 3), keepdim=True)
    heat = functional.relu((weights * activations.detach()).sum(dim=1, keepdim=True))
    heat = functional.interpolate(heat, size=size, mode="bilinear", align_corners=False)[:, 0]
    peaks = heat.amax(dim=(1, 2), keepdim=True)
    return np.asarray((heat / peaks.clamp(min=1e-12)).cpu(), np.float32)


def _forward(model: Network, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last activations with more than one position, as a leaf of the graph, and the logits."""
    blocks = list(model.blocks.values())
    outputs, x = [images], images
    with torch.no_grad():
        for block in blocks:
            x = block(x)
            outputs.append(x)
    last = max(
        index for index, output in enumerate(outputs) if output.ndim == 4 and output.shape[2] * output.shape[3] > 1
    )
    activations = outputs[last].detach().clone().requires_grad_()
    x = activations
    for block in blocks[last:]:
        x = block(x)
    return activations, x


def overlay_png(pixels: Images, heatmap: Heatmaps) -> bytes:
    """Return an image [H, W, C] with its heatmap on top, as a PNG."""
    position = np.clip(heatmap, 0, 1)[..., None] * (len(_COLORMAP) - 1)
    index = np.minimum(position.astype(np.int64), len(_COLORMAP) - 2)
    low, high = _COLORMAP[index[..., 0]], _COLORMAP[index[..., 0] + 1]
    colors = low + (high - low) * (position - index)
    weight = 0.15 + 0.45 * np.clip(heatmap, 0, 1)[..., None]
    mixed = np.broadcast_to(pixels, (*pixels.shape[:2], 3)) * (1 - weight) + colors * weight
    return _to_png(np.clip(np.rint(mixed), 0, 255).astype(np.uint8))


def input_png(pixels: Images) -> bytes:
    """Return a model input [H, W, C] as a PNG."""
    return _to_png(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def _to_png(pixels: Images) -> bytes:
    """Encode pixels, enlarging small images by a whole factor."""
    image = Image.fromarray(pixels)
    factor = max(1, _VISIBLE_SIDE // max(image.size))
    file = io.BytesIO()
    image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()
