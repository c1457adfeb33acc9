"""LeNet and ResNets as PyTorch users write them, without any module of convolve."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """ReLU of the sum of a branch and a shortcut."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.branch(x) + self.shortcut(x))


class Subsample(nn.Module):
    """Shortcut without weights: every second pixel, and channels of zeros."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.extra))


def convolve(inner: int, outer: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inner, outer, size, stride, size // 2, bias=False), nn.BatchNorm2d(outer)]


def build_lenet() -> nn.Module:
    """LeNet with batch norm for 28 x 28 pixels in ten classes."""
    layers: list[nn.Module] = [nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True), nn.BatchNorm2d(20)]
    layers += [nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(800, 10))


def build_resnet20() -> nn.Module:
    """ResNet-20 for 32 x 32 pixels in ten classes."""
    layers: list[nn.Module] = [*convolve(3, 16, 3), nn.ReLU(inplace=True)]
    width = 16
    for wide in (16, 32, 64):
        for _ in range(3):
            stride = 1 if wide == width else 2
            branch = nn.Sequential(*convolve(width, wide, 3, stride), nn.ReLU(inplace=True), *convolve(wide, wide, 3))
            layers.append(Residual(branch, nn.Identity() if wide == width else Subsample(wide - width)))
            width = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def build_resnet50() -> nn.Module:
    """ResNet-50 v1.5 for 224 x 224 pixels in a thousand classes."""
    layers: list[nn.Module] = [*convolve(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for number, (inner, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if number and not block else 1
            branch = nn.Sequential(
                *convolve(width, inner, 1),
                nn.ReLU(inplace=True),
                *convolve(inner, inner, 3, stride),
                nn.ReLU(inplace=True),
                *convolve(inner, 4 * inner, 1),
            )
            shortcut = nn.Identity() if block else nn.Sequential(*convolve(width, 4 * inner, 1, stride))
            layers.append(Residual(branch, shortcut))
            width = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


NETWORKS = {
    "lenet": (build_lenet, (1, 28, 28), 10),
    "resnet20": (build_resnet20, (3, 32, 32), 10),
    "resnet50": (build_resnet50, (3, 224, 224), 1000),
}


def build(name: str) -> tuple[nn.Module, tuple[int, int, int], int]:
    """Return a model, its input shape and number of classes."""
    make, shape, classes = NETWORKS[name]
    torch.manual_seed(0)
    return make(), shape, classes
