"""Damaged data of every format, read as training reads them: the same samples, or one line that names the place."""

import gzip
import hashlib
import random
import shutil

import numpy as np
import pytest
import torch

from cifar_files import write_binary, write_python
from convolve.config.schema import DataConfig
from convolve.data.catalog import CIFAR10, MNIST
from convolve.data.image_io import center_box
from convolve.data.loader.decoder import Decoder
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.lookup import open_dataset
from convolve.data.readers.mnist import pack_idx
from convolve.download import ignore_progress
from convolve.errors import DataError
from photo_sets import write_every_format

CHANCE = np.random.default_rng(0)
IMAGES, LABELS = CHANCE.integers(0, 256, (40, 28, 28), np.uint8), np.arange(40) % 10


def write_idx(folder, ending=""):
    folder.mkdir()
    for file, values in zip(MNIST.files, (IMAGES, LABELS, IMAGES[:20], LABELS[:20]), strict=True):
        data = pack_idx(values)
        (folder / f"{file.name}{ending}").write_bytes(gzip.compress(data, mtime=0) if ending else data)


def write_npz(folder):
    folder.mkdir()
    arrays = {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[:20], "y_test": LABELS[:20]}
    np.savez_compressed(folder / "mnist.npz", **arrays)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Write every format in a separate folder."""
    root = tmp_path_factory.mktemp("whole")
    write_idx(root / "idx")
    write_idx(root / "gzip", ".gz")
    write_npz(root / "npz")
    write_binary(root / "cifar-binary", CIFAR10)
    write_python(root / "cifar-python", CIFAR10)
    write_every_format(root)
    return root


# The data set, the damaged file, and if the format has checksums, which detect any flipped byte.
FORMATS = {
    "idx": ("mnist", MNIST.files[0].name, False),
    "gzip": ("mnist", f"{MNIST.files[0].name}.gz", True),
    "npz": ("mnist", "mnist.npz", True),
    "cifar-binary": ("cifar-10", "data_batch_1.bin", False),
    "cifar-python": ("cifar-10", "data_batch_1", False),
    "folder": ("pictures", "train/class-0/0.jpg", False),
    "tar": ("pictures", "train-000000.tar", False),
    "tfrecord": ("pictures", "train-00000-of-00003", True),
    "tfds": ("pictures", "little-train.tfrecord-00000-of-00002", True),
    "raw": ("pictures", "train-images.npy", False),
}


def digest(samples):
    """A hash of all samples of a split, and how many there are."""
    if isinstance(samples, InMemoryImages):
        return len(samples), hashlib.sha256(samples.images.tobytes() + samples.labels.tobytes()).hexdigest()
    found = hashlib.sha256(samples.labels.tobytes())
    decoder, pixels = Decoder(samples, 0), torch.zeros((48, 48, 3), dtype=torch.uint8)
    for row in range(len(samples)):
        decoder.decode(row, lambda size: center_box(size, 1.0), pixels, flip=False)
        found.update(pixels.numpy().tobytes())
    return len(samples), found.hexdigest()


def read(folder, dataset):
    config = DataConfig(dataset=dataset, data_dir=folder, dataset_cache=False)
    return digest(open_dataset(config, announce=print, progress=ignore_progress).train)


class Damaged:
    """A copy of a format, one file of which can be written anew."""

    def __init__(self, whole, kind, place):
        self.dataset, name, self.checked = FORMATS[kind]
        self.folder = shutil.copytree(whole / kind, place)
        self.file = self.folder / name
        self.data = self.file.read_bytes()
        self.digest = self.read()

    def read(self):
        return read(self.folder, self.dataset)

    def read_after(self, data):
        """The digest of what is read with these contents; None for a named error of one line."""
        self.file.write_bytes(data)
        try:
            return self.read()
        except DataError as error:
            assert str(self.folder) in str(error) and "\n" not in str(error)
            return None


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_at_any_64th_is_named_or_only_lost_its_padding(kind, whole, tmp_path, counted):
    damaged = Damaged(whole, kind, tmp_path / kind)
    for part in counted.each("input cut at a 64th", range(64)):
        assert damaged.read_after(damaged.data[: len(damaged.data) * part // 64]) in (None, damaged.digest)


@pytest.mark.parametrize("rounds", [20, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_flipped_byte_is_named_or_harmless_where_there_are_checksums_and_never_loses_a_sample(
    kind, rounds, whole, tmp_path, counted
):
    damaged, chance = Damaged(whole, kind, tmp_path / kind), random.Random(rounds)
    for _ in counted.each("input byte flipped", range(rounds)):
        data = bytearray(damaged.data)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        found = damaged.read_after(bytes(data))
        assert found is None or found[0] == damaged.digest[0]
        assert found in (None, damaged.digest) or not damaged.checked


def test_a_missing_shard_is_noticed_by_the_announced_number_of_samples(whole, tmp_path):
    folder = shutil.copytree(whole / "tar", tmp_path / "tar")
    (folder / "train-000002.tar").unlink()
    with pytest.raises(DataError, match=r"33 samples of train, metadata\.json announces 40; get a complete copy"):
        read(folder, "pictures")


def test_a_tar_damaged_in_the_middle_is_not_taken_for_a_shorter_one(whole, tmp_path):
    folder = shutil.copytree(whole / "tar", tmp_path / "tar")
    (folder / "metadata.json").unlink()
    file = folder / "train-000001.tar"
    data = bytearray(file.read_bytes())
    data[data.index(b"000000009.jpg")] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"train-000001\.tar: cut off or damaged at byte \d+"):
        read(folder, "pictures")
