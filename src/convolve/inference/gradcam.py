"""Grad-CAM: the image regions that support a prediction (Selvaraju et al., arXiv 1610.02391, section 3).

The arithmetic: A are the activations of the last block with more than one position, y the logit of the class. The
weight of a channel is w = mean over positions of dy/dA. The heatmap is ReLU(sum over channels of w A), scaled to 0..1.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from convolve.inference.overlay import Heatmaps
from convolve.models.network import Network


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
