"""Grad-CAM: where in a picture the evidence for an answer lies (Selvaraju et al., arXiv 1610.02391, section 3).

The arithmetic: A are the activations of the last block that still has a picture's shape, y the logit of the answer.
Each channel weighs w = mean over places of dy/dA; the map is ReLU(sum over channels of w A), scaled to 0..1.
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

Heat = npt.NDArray[np.float32]
_STOPS = np.array([(0, 0, 96), (0, 96, 255), (64, 255, 160), (255, 220, 0), (255, 32, 0)], np.float64)
_VISIBLE_SIDE = 224


def explain(network: Network, images: Tensor, answers: Tensor) -> Heat:
    """Heat maps [N, H, W] in 0..1 for normalized images [N, C, H, W] and the classes to explain."""
    size = (images.shape[2], images.shape[3])
    with torch.inference_mode(False), torch.enable_grad():
        activations, logits = _run(network, images.clone())
        (slopes,) = torch.autograd.grad(logits.gather(1, answers.view(-1, 1)).sum(), activations)
    weights = slopes.mean(dim=(2, 3), keepdim=True)
    heat = functional.relu((weights * activations.detach()).sum(dim=1, keepdim=True))
    heat = functional.interpolate(heat, size=size, mode="bilinear", align_corners=False)[:, 0]
    peaks = heat.amax(dim=(1, 2), keepdim=True)
    return np.asarray((heat / peaks.clamp(min=1e-12)).cpu(), np.float32)


def _run(network: Network, images: Tensor) -> tuple[Tensor, Tensor]:
    """The last activations with more than one place, cut off from what was before them, and the logits."""
    blocks = list(network.blocks.values())
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


def paint(pixels: Images, heat: Heat) -> bytes:
    """A picture [H, W, C] with the heat over it, large enough to be looked at, as a PNG."""
    shade = np.clip(heat, 0, 1)[..., None] * (len(_STOPS) - 1)
    place = np.minimum(shade.astype(np.int64), len(_STOPS) - 2)
    low, high = _STOPS[place[..., 0]], _STOPS[place[..., 0] + 1]
    colors = low + (high - low) * (shade - place)
    weight = 0.15 + 0.45 * np.clip(heat, 0, 1)[..., None]
    mixed = np.broadcast_to(pixels, (*pixels.shape[:2], 3)) * (1 - weight) + colors * weight
    image = Image.fromarray(np.clip(np.rint(mixed), 0, 255).astype(np.uint8))
    return to_png(image)


def to_png(image: Image.Image) -> bytes:
    """A picture as a PNG, small ones enlarged with their pixels kept square."""
    factor = max(1, _VISIBLE_SIDE // max(image.size))
    file = io.BytesIO()
    image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def show_input(pixels: Images) -> bytes:
    """The input of a network [H, W, C] as a PNG."""
    return to_png(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
