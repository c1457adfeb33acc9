"""Random images in the shape of a real data set, for measurements in which contents do not matter."""

import numpy as np

from convolve.data.catalogue import Entry
from convolve.data.dataset import Dataset, Split
from convolve.randomness import generator


def generated_split(count: int, size: int, channels: int, classes: int, seed: int) -> Split:
    """`count` random square images with random labels, the same ones for the same arguments."""
    images = generator(seed, "generated images").integers(0, 256, (count, size, size, channels), np.uint8)
    labels = generator(seed, "generated labels").integers(0, classes, count, np.int64)
    return Split(images, labels)


def generated_dataset(entry: Entry, seed: int) -> Dataset:
    """Random images with the counts, shape and classes of a known data set."""
    size, _, channels = entry.image_shape
    train, test = (
        generated_split(count, size, channels, len(entry.classes), seed + split)
        for split, count in enumerate((entry.train_count, entry.test_count))
    )
    return Dataset(entry.name, train, test, entry.classes, f"random images in the shape of {entry.name}")


def generated_photos(size: int, seed: int) -> Dataset:
    """A few hundred random colour images in a thousand classes, in the place of photographs."""
    train, test = (generated_split(count, size, 3, 1000, seed + split) for split, count in enumerate((512, 128)))
    classes = tuple(str(number) for number in range(1000))
    return Dataset("pictures", train, test, classes, f"random images of {size} x {size}")
