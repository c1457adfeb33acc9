"""Benchmark worker: `lenet-bn` in a typical PyTorch loop, with a DataLoader over images.

torch_peer.py MNIST.npz STEPS
"""

import sys
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from turns import serve, timed

BATCH = 64
Bytes = npt.NDArray[np.uint8]


class Digits(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Images converted to tensors one by one, as in the data sets of torchvision."""

    def __init__(self, images: Bytes, labels: Bytes) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = torch.from_numpy(np.array(Image.fromarray(self.images[index])))[None].float().div(255)
        return pixels.sub_(0.5).div_(0.5), int(self.labels[index])


def main() -> None:
    data, steps = np.load(sys.argv[1]), int(sys.argv[2])
    digits = Digits(data["images"], data["labels"])
    first, second = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
    pool, relu = nn.MaxPool2d(2), nn.ReLU()
    model = nn.Sequential(first, relu, pool, nn.BatchNorm2d(20), second, relu, pool, nn.Flatten(), nn.Linear(800, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loader = torch.utils.data.DataLoader(digits, batch_size=BATCH, shuffle=True, drop_last=True)

    def train(count: int = steps) -> int:
        done = 0
        for images, labels in islice(loader, count):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
            done += len(labels)
        return done

    train(20)
    serve(timed(train))


if __name__ == "__main__":
    main()
