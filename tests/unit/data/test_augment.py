import numpy as np
import pytest
import torch

from convolve.config.schema import DataConfig
from convolve.data.build import build_augment, fit_normalization, open_test_loader, open_train_loader, select_samples
from convolve.data.dataset import Dataset
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.transforms.augment import Augment, crop_padded, pad_images
from convolve.data.transforms.normalize import Transform
from convolve.data.transforms.randaugment import OPERATIONS
from convolve.errors import ConfigError
from convolve.rng import SampleRNG

CPU = torch.device("cpu")
ROWS = np.arange(40)


def make_split(count=40, size=12, channels=3):
    draw = np.random.default_rng(1)
    return InMemoryImages(draw.integers(0, 256, (count, size, size, channels), np.uint8), draw.integers(0, 10, count))


def make_fetcher(augment, split=None, size=None):
    split = split or make_split()
    side = size or split.images.shape[1]
    channels = split.images.shape[3]
    return split.fetcher(Transform(side, side, (0.5,) * channels, (0.2,) * channels), augment, CPU)


@pytest.mark.parametrize("mode", ["mean", "black", "reflect"])
def test_a_padded_crop_equals_one_made_by_hand(mode):
    split, fill = make_split(), torch.tensor([1, 2, 3], dtype=torch.uint8)
    padded = pad_images(torch.from_numpy(split.images), 4, mode, fill)
    chance = np.random.default_rng(0)
    rows, corners = torch.from_numpy(chance.integers(0, 40, 25)), torch.from_numpy(chance.integers(0, 9, (25, 2)))
    cropped = crop_padded(padded, rows, corners, (12, 12))
    for index, (row, (top, left)) in enumerate(zip(rows.tolist(), corners.tolist(), strict=True)):
        if mode == "reflect":
            whole = np.pad(split.images[row], ((4, 4), (4, 4), (0, 0)), mode="reflect")
        else:
            whole = np.empty((20, 20, 3), np.uint8)
            whole[:] = fill.numpy() if mode == "mean" else 0
            whole[4:16, 4:16] = split.images[row]
        assert np.array_equal(cropped[index].numpy(), whole[top : top + 12, left : left + 12])


def test_every_place_of_a_crop_occurs():
    split = InMemoryImages(
        np.arange(12, dtype=np.uint8).reshape(1, 12, 1, 1).repeat(400, 0).repeat(12, 2), np.zeros(400, int)
    )
    pixels = make_fetcher(Augment(crop="pad", padding=2, padding_mode="black"), split).fetch(
        np.arange(400), SampleRNG(0, 0)
    )
    tops = {tuple(image[:, 6, 0].tolist()) for image in pixels}
    assert len(tops) == 5


def test_alternating_flips_show_each_side_in_every_second_epoch():
    flipping = make_fetcher(Augment(flip="alternating"))
    epochs = [flipping.fetch(ROWS, SampleRNG(7, epoch)) for epoch in range(4)]
    assert torch.equal(epochs[0], epochs[2]) and torch.equal(epochs[1], epochs[3])
    assert torch.equal(epochs[0], epochs[1].flip(2))
    flipped = (epochs[0] != torch.from_numpy(make_split().images)).flatten(1).any(1)
    assert 5 < int(flipped.sum()) < 35


def test_random_flips_are_drawn_anew_in_each_epoch():
    flips = [SampleRNG(7, epoch).flips(np.arange(1000), alternating=False) for epoch in range(2)]
    assert 0.4 < np.mean(flips[0] != flips[1]) < 0.6


FULL = Augment(crop="resized", flip="random", cutout=4, erase_probability=0.5, jitter=(0.3, 0.3, 0.3), layers=2)


@pytest.mark.parametrize("augment", [Augment(crop="pad", flip="random"), FULL], ids=["pad", "all"])
def test_a_sample_does_not_depend_on_its_batch(augment):
    whole = make_fetcher(augment).fetch(ROWS, SampleRNG(3, 1)).float()
    shuffled = np.random.default_rng(0).permutation(40)
    parts = torch.cat(
        [make_fetcher(augment).fetch(rows, SampleRNG(3, 1)).float() for rows in np.array_split(shuffled, 7)]
    )
    assert torch.allclose(whole[shuffled], parts, atol=1e-3)
    assert not torch.allclose(whole, make_fetcher(augment).fetch(ROWS, SampleRNG(3, 2)).float(), atol=1e-3)


def test_evaluation_is_not_augmented():
    assert np.array_equal(make_fetcher(FULL).fetch(ROWS, None).numpy(), make_split().images)


def test_cutout_fills_a_square_with_the_mean_color():
    pixels = make_fetcher(Augment(cutout=4)).fetch(ROWS, SampleRNG(0, 0)).numpy()
    changed = (pixels != make_split().images).any(3)
    assert np.all(pixels[changed] == 128)
    assert changed.sum((1, 2)).max() <= 16 and changed.sum((1, 2)).min() >= 3


def test_erasing_has_its_configured_probability():
    split = make_split(400)
    pixels = make_fetcher(Augment(erase_probability=0.25), split).fetch(np.arange(400), SampleRNG(0, 0)).numpy()
    assert 0.15 < (pixels != split.images).any((1, 2, 3)).mean() < 0.35


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_of_randaugment_keeps_the_range_and_does_nothing_at_zero(operation):
    images = torch.from_numpy(make_split().images).permute(0, 3, 1, 2).float().contiguous()
    strong = operation(images, torch.linspace(-1, 1, 40))
    assert strong.shape == images.shape and strong.min() >= -1e-3 and strong.max() <= 255 + 1e-3
    if operation not in (OPERATIONS[1], OPERATIONS[2]):  # autocontrast has no strength, solarize keeps only black
        assert torch.allclose(operation(images, torch.zeros(40)), images, atol=1e-2)


def test_another_image_size_resizes_training_and_test_images():
    split = make_split()
    for size in (6, 12, 24):
        config = DataConfig(image_size=size, augment="pad-crop-flip", normalization="standard")
        transform = fit_normalization(split, config)
        for loader in (
            open_train_loader(split, transform, CPU, config),
            open_test_loader(split, transform, CPU, config),
        ):
            assert next(loader.batches(8)).images.shape == (8, 3, size, size)


def test_gray_images_stay_as_they_are_and_color_images_are_cropped_and_flipped():
    assert build_augment(DataConfig(), make_split(channels=1)) == Augment()
    assert build_augment(DataConfig(), make_split()).crop == "pad"
    assert build_augment(DataConfig(train_with_valid_preprocessing=True), make_split()) == Augment()


def test_a_percentage_of_the_training_images_is_taken_evenly():
    dataset = Dataset("x", make_split(), make_split(7), tuple("0123456789"), "here")
    kept = select_samples(dataset, DataConfig(dataset_percentage_to_use=25, hold_out=8))
    assert len(kept.train) == 8 and len(kept.test) == 7
    assert np.array_equal(kept.train.labels, dataset.train.labels[8::4])


def test_imagenet_figures_are_for_color_only():
    with pytest.raises(ConfigError, match="only for color images"):
        fit_normalization(make_split(channels=1), DataConfig(normalization="imagenet"))
    transform = fit_normalization(make_split(), DataConfig(normalization="imagenet-mean"))
    images = transform(torch.full((1, 12, 12, 3), 200, dtype=torch.uint8))
    assert images[0, :, 0, 0].tolist() == pytest.approx([200 - 255 * m for m in (0.485, 0.456, 0.406)], abs=1e-3)
