"""Images of a run's own data, for the verbs that look at a trained network from outside."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from convolve.app.assembly import Material, Trained, load_dataset
from convolve.app.console import Console
from convolve.data.dataset import Images, Labels
from convolve.data.transform import Transform
from convolve.errors import CheckpointError

BATCH = 256


def open_material(trained: Trained, console: Console) -> Material:
    """The data that a network was trained on, with its transform, on the network's device."""
    dataset = load_dataset(trained.config, console)
    if dataset.classes != trained.classes:
        raise CheckpointError(
            f"{trained.path}: trained on classes {trained.classes[:3]}..., the data has {dataset.classes[:3]}...; "
            "give the data it was trained on"
        )
    return Material(dataset, trained.transform, next(trained.network.parameters()).device)


def to_pixels(images: Tensor, transform: Transform) -> Images:
    """The uint8 pixels [N, H, W, C] that a network's input [N, C, H, W] was made from."""
    values = images.detach().to("cpu", torch.float64).permute(0, 2, 3, 1).numpy()
    pixels = (values * np.array(transform.std) + np.array(transform.mean)) * 255
    return np.ascontiguousarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


def training_pixels(material: Material, seed: int, count: int) -> Images:
    """Training images in their shuffled order, as many as asked for or as there are."""
    loader = material.train_loader()
    count = min(count, len(loader))
    found: list[Images] = []
    for window in loader.windows(seed, 0, (BATCH, BATCH)):
        found += [to_pixels(batch.images, material.transform) for batch in window.batches]
        if sum(map(len, found)) >= count:
            break
    return np.concatenate(found)[:count]


def each_test_batch(material: Material) -> Iterator[tuple[Images, Labels]]:
    """Every test image once with its label, in batches."""
    for batch in material.test_loader().batches(BATCH):
        yield to_pixels(batch.images, material.transform), batch.labels.cpu().numpy()
