"""Small photographs of three classes in every format that convolve reads, and short trainings on them."""

import numpy as np
from PIL import Image

from convolve.config.loading import resolve
from convolve.data.prepare import PrepareOptions, prepare
from convolve.data.readers.detect import open_images
from convolve.download import ignore_progress
from record_files import write_imagenet, write_tfds

FORMATS = {
    "folder": "folders",
    "tar": "WebDataset",
    "tfrecord": "ImageNet TFRecord",
    "tfds": "TFDS",
    "raw": "raw store",
}


def write_every_format(root):
    """Write folders `root/<format>` with the same 40 and 12 smooth images."""
    for split, count in (("train", 40), ("val", 12)):
        for number in range(count):
            chance = np.random.default_rng([len(split), number])
            folder = root / "folder" / split / f"class-{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(chance.integers(0, 256, (4, 4, 3), np.uint8))
            coarse.resize((80, 80), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
    dataset = open_images(root / "folder", "folder", ignore_progress)
    prepare(dataset, root / "tar", PrepareOptions("webdataset", shard_samples=7), 2, ignore_progress)
    prepare(dataset, root / "raw", PrepareOptions("raw", size=80), 2, ignore_progress)
    train_samples, test_samples = (_listed(split) for split in (dataset.train, dataset.test))
    write_imagenet(root / "tfrecord", train_samples, test_samples, shards=3)
    write_tfds(root / "tfds", train_samples, test_samples, shards=2)
    return root


def _listed(gallery):
    return [(gallery.read(row), label) for row, label in enumerate(gallery.labels.tolist())]


def photo_config(photos, kind, folder, **given):
    """Return the config of a run of a few steps on one of the formats."""
    small = {"model": "lenet5", "data_dir": photos / kind, "image_size": 48, "epochs": 2, "batch_size": 8, "threads": 1}
    quiet = {"curves": False, "report": False, "log_freq": 1, "learning_rate": 0.01, "normalization": "imagenet"}
    return resolve(None, None, {**small, **quiet, "run_dir": folder, **given}).config
