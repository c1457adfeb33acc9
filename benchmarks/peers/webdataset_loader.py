"""Benchmark worker: WebDataset from tars, with Pillow, torchvision's transforms and two worker processes.

webdataset_loader.py FOLDER BATCHES
"""

import sys
from collections.abc import Iterator

import peers.torchvision_ops  # noqa: F401

# isort: split
import torch
import webdataset
from torch import Tensor
from torchvision import transforms

from peers.loading import AREA, ASPECT, BATCH, SIZE, WORKERS, serve_batches


def load(folder: str) -> Iterator[Tensor]:
    crop = transforms.RandomResizedCrop(SIZE, scale=AREA, ratio=ASPECT)
    augment = transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    shards = [f"{folder}/shard-{number}.tar" for number in range(WORKERS)]
    dataset = webdataset.WebDataset(shards, shardshuffle=WORKERS, resampled=False).repeat().shuffle(1000)
    dataset = dataset.decode("pil").to_tuple("jpg", "cls").map_tuple(augment, int).batched(BATCH)
    for images, _ in webdataset.WebLoader(dataset, batch_size=None, num_workers=WORKERS):
        yield torch.as_tensor(images)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve_batches(load(sys.argv[1]), int(sys.argv[2]))
