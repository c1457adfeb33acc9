"""Benchmark worker: the public record for 94 % on CIFAR-10 (airbench94_muon, Jordan 2024), on this CPU.

    python benchmarks/record.py STEPS

The original script needs a GPU and 16-bit formats. This is its model and its update in plain PyTorch for a CPU in fp32:
channels-last, a fused optimizer and an allocator that keeps freed memory, on one batch of 2000 images in memory. Only
the time of a step counts, so all parameters but convolutions have one learning rate, and the bias of the first layer is
frozen, as in the record from its third epoch on, which is faster.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from loops import keep_freed_memory
from turns import serve, timed

BATCH = 2000
ROUNDS = (3.4445, -4.7750, 2.0315)


def build() -> nn.Sequential:
    """2x2 whitening, three pairs of 3x3 convolutions with a pool inside each, and one linear layer."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 2), nn.GELU()]
    width = 24
    for wide in (64, 256, 256):
        layers += [nn.Conv2d(width, wide, 3, padding=1, bias=False), nn.MaxPool2d(2), *norm_and_gelu(wide)]
        layers += [nn.Conv2d(wide, wide, 3, padding=1, bias=False), *norm_and_gelu(wide)]
        width = wide
    layers[0].requires_grad_(False)
    return nn.Sequential(*layers, nn.MaxPool2d(3), nn.Flatten(), nn.Linear(width, 10, bias=False))


def norm_and_gelu(channels: int) -> list[nn.Module]:
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return [norm, nn.GELU()]


def orthogonalize(matrix: Tensor) -> Tensor:
    a, b, c = ROUNDS
    x: Tensor = matrix / (matrix.norm() + 1e-7)
    for _ in range(3):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


class Muon:
    """Orthogonalized momentum for convolutions; weights keep their norm."""

    def __init__(self, weights: list[Tensor], rate: float, momentum: float) -> None:
        self.moving = [(weight, torch.zeros_like(weight)) for weight in weights]
        self.rate, self.momentum = rate, momentum

    @torch.no_grad()
    def step(self) -> None:
        for weight, velocity in self.moving:
            assert weight.grad is not None
            velocity.mul_(self.momentum).add_(weight.grad)
            ahead = weight.grad.add(velocity, alpha=self.momentum)
            weight.mul_(len(weight) ** 0.5 / weight.norm())
            weight.add_(orthogonalize(ahead.reshape(len(ahead), -1)).view_as(ahead), alpha=-self.rate)


def main() -> None:
    steps = int(sys.argv[1])
    keep_freed_memory()
    torch.manual_seed(0)
    model = build().train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (BATCH,))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    muon = Muon([one for one in trained if one.ndim == 4], rate=0.24, momentum=0.6)
    rest = torch.optim.SGD(
        [one for one in trained if one.ndim != 4], 0.05, 0.85, weight_decay=0.07, nesterov=True, fused=True
    )

    def train(count: int = steps) -> int:
        for _ in range(count):
            logits = model(images) / 256
            loss = functional.cross_entropy(logits, labels, label_smoothing=0.2, reduction="sum")
            torch.autograd.backward(loss)
            muon.step()
            rest.step()
            model.zero_grad(set_to_none=True)
        return count * BATCH

    train(1)
    serve(timed(train))


if __name__ == "__main__":
    main()
