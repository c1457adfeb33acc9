"""`fastnet`: a small model that trains on CIFAR-10 in few operations.

In the spirit of the public speed-run records (Jordan 2024, "94 % on CIFAR-10 in 3.29 seconds"): the first layer whitens
2x2 patches and is computed from the training images instead of trained, the other convolutions start as partial
identities, norms have no gamma, and the logits are scaled down.

The arithmetic of the first layer: with 2x2 patches p, and the eigenvectors v_i and eigenvalues l_i of E[p p^T], its
filters are v_i / sqrt(l_i + epsilon) and their negatives. Only its bias is trained. The last layer starts with weights
of standard deviation 1, and logits are divided by its width.
"""

import torch
from torch import Generator, Tensor, nn

from convolve.config.model_options import FastNetOptions
from convolve.errors import ConfigError
from convolve.layers.batch_norm import BatchNorm2d
from convolve.layers.init import PerLayerInit, fan_in_uniform, unit_uniform, zeros
from convolve.models.spec import BuildArgs, ModelSpec

WIDTHS = (64, 256, 256)
WHITENED_IMAGES = 5000
EPSILON = 5e-4
MIN_SIDE = 17


class Whitening(nn.Conv2d):
    """2x2 convolution whose filters come from the training images; only the bias is trained."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 2 * 4 * channels, 2, bias=True)
        self.weight.requires_grad_(False)

    @torch.no_grad()
    def fit_images(self, images: Tensor) -> None:
        """Compute the filters from a sample of model inputs."""
        patches = nn.functional.unfold(images[:WHITENED_IMAGES].contiguous(), 2).transpose(1, 2).flatten(0, 1).double()
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (vectors / (values + EPSILON).sqrt()).T.flip(0).reshape(-1, *self.weight.shape[1:])
        self.weight.copy_(torch.cat((filters, -filters)))


class Scale(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class ConvPair(nn.Module):
    """Convolution, pool, norm, GELU, convolution, norm, GELU."""

    def __init__(self, inputs: int, outputs: int, epsilon: float, decay: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.bn1 = _norm(outputs, epsilon, decay)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = _norm(outputs, epsilon, decay)

    def forward(self, x: Tensor) -> Tensor:
        gelu = nn.functional.gelu
        x = gelu(self.bn1(self.pool(self.conv1(x))))
        return gelu(self.bn2(self.conv2(x)))


def _norm(channels: int, epsilon: float, decay: float) -> BatchNorm2d:
    norm = BatchNorm2d(channels, eps=epsilon, momentum=1 - decay)
    norm.weight.requires_grad_(False)
    return norm


def assemble(order: BuildArgs) -> dict[str, nn.Module]:
    """Return the blocks."""
    channels, height, width = order.input_shape
    if min(height, width) < MIN_SIDE:
        raise ConfigError(
            f"model {order.name}: {height}x{width} images are too small; use at least {MIN_SIDE}x{MIN_SIDE}"
        )
    options = FastNetOptions.read(order.options)
    whitening = Whitening(channels)
    blocks: dict[str, nn.Module] = {"whiten": whitening, "act": nn.GELU()}
    inputs = whitening.out_channels
    for number, outputs in enumerate(WIDTHS, start=1):
        blocks[f"pair{number}"] = ConvPair(inputs, outputs, options.norm_epsilon, options.bn_decay)
        inputs = outputs
    blocks["pool"] = nn.AdaptiveMaxPool2d(1)
    blocks["flatten"] = nn.Flatten()
    blocks["fc"] = nn.Linear(inputs, order.classes, bias=False)
    blocks["scale"] = Scale(1 / inputs)
    return blocks


class PartialIdentity(PerLayerInit):
    """Convolutions start as the identity on as many channels as possible, and like torch's layers on the others."""

    def __call__(self, name: str, owner: nn.Module, values: Tensor, generator: Generator) -> None:
        super().__call__(name, owner, values, generator)
        if isinstance(owner, nn.Conv2d) and not isinstance(owner, Whitening):
            nn.init.dirac_(values[: values.shape[1]])


MODELS = {
    "fastnet": ModelSpec(
        assemble,
        PartialIdentity(conv=fan_in_uniform, linear=unit_uniform, bias=zeros),
        "whitening, three pairs of convolutions: learns CIFAR-10 in few operations",
        input_shape=(3, 32, 32),
    ),
}
