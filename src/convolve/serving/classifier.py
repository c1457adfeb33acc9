"""The whole way from pixels to logits as one module: what is exported has no normalisation left to forget."""

import copy

import torch
from torch import Tensor, nn

from convolve.data.transform import Transform


class Classifier(nn.Module):
    """uint8 pixels [N, H, W, C] to logits [N, classes], in plain memory layout on the CPU, for evaluation only."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, transform: Transform) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).to(device="cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.register_buffer("scale", torch.tensor([1 / (255 * std) for std in transform.std]))
        self.register_buffer(
            "shift", torch.tensor([-m / s for m, s in zip(transform.mean, transform.std, strict=True)])
        )
        self.eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalise and classify."""
        images = pixels.to(torch.float32) * self.scale + self.shift
        logits: Tensor = self.network(images.permute(0, 3, 1, 2))
        return logits
