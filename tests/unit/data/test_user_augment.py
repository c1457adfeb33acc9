"""Augmentation by the user's code: keyed by the sample, for images in memory and photographs, with clear errors."""

import random

import numpy as np
import pytest
import torch

from convolve import plugins
from convolve.config.schema import DataConfig
from convolve.data.build import build_augment, fit_normalization, open_train_loader
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.loader.loader import ReplicaShard
from convolve.data.readers.detect import open_images
from convolve.data.transforms.user import UserAugment, read_augment
from convolve.download import ignore_progress
from convolve.errors import ConfigError
from photo_sets import write_every_format

CPU = torch.device("cpu")


def draw_from_all(image):
    """Draw from the three global generators."""
    shift = int(torch.randint(3, ())) + random.randrange(3) + int(np.random.randint(3))
    return image.roll(shift, 1)


def draw_from_rng(image, rng):
    return image.roll(int(rng.integers(5)), 2)


class Counter:
    """Counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, image):
        self.calls += 1
        return image.roll(self.calls, 1)


def make_split(count=24):
    draw = np.random.default_rng(1)
    return InMemoryImages(draw.integers(0, 256, (count, 8, 8, 3), np.uint8), draw.integers(0, 4, count))


def images_of(reader, function, *, micro=8, replicas=1, position=0, **options):
    """The images of one step, in the order of the global batch."""
    config = DataConfig(augment="test:function", image_size=16 if reader.image_shape is None else None, **options)
    loader = open_train_loader(reader, fit_normalization(reader, config), CPU, config, read_augment(function))
    parts = [next(loader.step_batches(3, position, micro, 8, ReplicaShard(i, replicas))) for i in range(replicas)]
    batches = sorted((batch for part in parts for batch in part.micro_batches), key=lambda batch: batch.first)
    return torch.cat([batch.images for batch in batches])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = write_every_format(tmp_path_factory.mktemp("photos"))
    return open_images(root / "folder", "folder", ignore_progress).train


@pytest.mark.parametrize("function", [draw_from_all, draw_from_rng])
def test_an_image_is_the_same_in_any_division_of_the_batch(function):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    whole = images_of(make_split(), function)
    assert torch.equal(whole, images_of(make_split(), function, micro=2))
    assert torch.equal(whole, images_of(make_split(), function, micro=4, replicas=2))
    assert states[:2] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(states[2], torch.get_rng_state())


def test_an_epoch_has_other_random_numbers_than_the_one_before():
    split = InMemoryImages(make_split().images.repeat(1, 0)[:8], np.zeros(8, np.int64))
    first, second = (images_of(split, draw_from_rng, position=position) for position in (0, 8))
    assert not torch.equal(first.sort(0).values, second.sort(0).values)


@pytest.mark.parametrize("workers", [0, 2])
def test_photographs_are_cropped_at_random_and_then_augmented(photos, workers):
    seen = []

    def observe(image):
        seen.append((image.shape, image.dtype))
        return 255 - image

    inverted = images_of(photos, observe, workers=workers)
    plain = images_of(photos, lambda image: image, workers=workers)
    assert set(seen) == {((3, 16, 16), torch.uint8)}
    torch.testing.assert_close(inverted + plain, torch.ones_like(plain))
    assert build_augment(DataConfig(augment="a:b"), photos, UserAugment("a:b", observe)).crop == "resized"


def test_colors_and_cutout_come_after_the_augmentation_of_the_user():
    white = images_of(make_split(), lambda image: torch.full_like(image, 255), cutout=4)
    assert white.unique().tolist() == [0.0, 1.0], "cutout fills with the mean of the normalization"


def test_an_augmentation_replaces_crops_and_flips():
    config = DataConfig(augment="a:b", flip="alternating")
    augment = build_augment(config, make_split(), UserAugment("a:b", draw_from_rng))
    assert (augment.crop, augment.flip) == ("none", "none")


def test_the_stored_images_stay_as_they_are():
    split = make_split()
    before = split.images.copy()
    images_of(split, lambda image: image.zero_())
    assert np.array_equal(split.images, before)


def small(image):
    return image[:, :4]


def as_float(image):
    return image / 255


def no_argument():
    return None


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (small, r"augmentation .*:small: returned \[3, 4, 8\] uint8 for an image \[3, 8, 8\] uint8; return the same"),
        (as_float, r"augmentation .*:as_float: returned \[3, 8, 8\] float32 for an image \[3, 8, 8\] uint8"),
        (lambda image: None, "augmentation .*: returned NoneType; return a tensor"),
        (7, "augmentation 7: is int; give a function of an image"),
        ("rolled", "augmentation rolled: unknown name; register it with @convolve.augmentations.register"),
        ("no_such_package:roll", "--augment no_such_package:roll: cannot import no_such_package .ModuleNotFoundError"),
    ],
)
def test_a_wrong_augmentation_is_one_clear_line(function, problem, monkeypatch):
    monkeypatch.setattr(plugins.AUGMENTATIONS, "_registered", {})
    with pytest.raises(ConfigError, match=problem) as caught:
        images_of(make_split(), function)
    assert "\n" not in str(caught.value)


def test_an_exception_passes_with_the_sample():
    with pytest.raises(TypeError, match="no_argument") as caught:
        images_of(make_split(), no_argument)
    if hasattr(caught.value, "__notes__"):
        [note] = caught.value.__notes__
        assert note.startswith("raised by augmentation ") and note.endswith("[3, 8, 8] uint8")


def test_a_class_by_name_is_made_once(monkeypatch):
    monkeypatch.setattr(plugins.AUGMENTATIONS, "_registered", {})
    plugins.AUGMENTATIONS.register("counter", Counter, "test")
    assert isinstance(read_augment("counter").function, Counter)
    with pytest.raises(ConfigError, match="augmentation counter: offered more than once .test, other.; rename one"):
        plugins.AUGMENTATIONS.register("counter", Counter, "other")
