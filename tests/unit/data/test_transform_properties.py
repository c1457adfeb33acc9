"""Properties of crops, padding, flips, fills, color operations, normalization and mixing, for arbitrary sizes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convolve.data.image_io import center_box
from convolve.data.transforms.augment import (
    NUMBERS,
    Augment,
    crop_and_resize,
    crop_padded,
    draw_box,
    draw_box_on,
    draw_boxes,
    flip_images,
    pad_images,
)
from convolve.data.transforms.mixup import NO_MIXING, Cutmix, Mixing
from convolve.data.transforms.normalize import IMAGENET_MEAN, IMAGENET_STD, Transform, fit_channels
from convolve.data.transforms.randaugment import OPERATIONS, jitter_colors, randaugment
from convolve.errors import CheckpointError
from convolve.rng import SampleRNG

sides = st.integers(1, 300)
seeds = st.integers(0, 10_000)
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)


def draw_numbers(seed, count=NUMBERS):
    return np.random.default_rng(seed).random(count).tolist()


def make_pixels(count, height, width, channels=3, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, height, width, channels), np.uint8))


@settings(deadline=None)
@given(height=sides, width=sides, seed=seeds)
def test_a_random_crop_is_inside_the_image_and_not_empty(height, width, seed):
    top, left, rows, columns = draw_box(draw_numbers(seed), (height, width), AREA, ASPECT)
    assert rows >= 1 and columns >= 1
    assert 0 <= top <= height - rows and 0 <= left <= width - columns


@settings(deadline=None)
@given(height=st.integers(50, 300), width=st.integers(50, 300), seed=seeds)
def test_a_random_crop_of_a_large_image_has_an_allowed_area_and_aspect(height, width, seed):
    _, _, rows, columns = draw_box(draw_numbers(seed), (height, width), (0.2, 0.5), ASPECT)
    assert 0.18 < rows * columns / (height * width) < 0.53 or rows == height or columns == width
    assert 0.7 < columns / rows < 1.43


@pytest.mark.parametrize(
    ("size", "box"),
    [((100, 10), (43, 0, 13, 10)), ((10, 100), (0, 43, 10, 13)), ((10, 12), (0, 0, 10, 12))],
    ids=["tall", "wide", "whole"],
)
def test_a_crop_that_never_fits_is_the_largest_centered_box(size, box):
    """An area of ten times the image fits in no attempt."""
    assert draw_box(draw_numbers(0), size, (10.0, 10.0), ASPECT) == box


@settings(deadline=None)
@given(seed=seeds)
def test_a_crop_on_an_object_shows_a_tenth_of_it_or_is_the_largest_box(seed):
    size, objects = (80, 60), np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)
    top, left, rows, columns = draw_box_on(draw_numbers(seed), size, (0.05, 0.2), ASPECT, objects)
    x1, y1, x2, y2 = objects[0] * np.array((60, 80, 60, 80))
    shown = max(0, min(x2, left + columns) - max(x1, left)) * max(0, min(y2, top + rows) - max(y1, top))
    assert shown >= 0.1 * (x2 - x1) * (y2 - y1) - 1e-3 or (rows, columns) == (80, 60)


def test_boxes_of_a_batch_equal_those_of_single_images():
    numbers = np.random.default_rng(1).random((5, NUMBERS))
    boxes = draw_boxes(numbers, (40, 30), AREA, ASPECT)
    assert boxes.tolist() == [list(draw_box(row, (40, 30), AREA, ASPECT)) for row in numbers.tolist()]
    assert draw_boxes(np.empty((0, NUMBERS)), (40, 30), AREA, ASPECT).shape == (0, 4)


@settings(deadline=None)
@given(height=sides, width=sides, fraction=st.floats(0.01, 1.0))
def test_a_center_box_is_a_square_with_equal_margins(height, width, fraction):
    top, left, rows, columns = center_box((height, width), fraction)
    assert rows == columns == max(1, round(min(height, width) * fraction))
    assert 0 <= (height - rows) - 2 * top <= 1 and 0 <= (width - columns) - 2 * left <= 1


@settings(deadline=None, max_examples=40)
@given(
    height=st.integers(2, 9),
    width=st.integers(2, 9),
    channels=st.sampled_from([1, 3]),
    mode=st.sampled_from(["mean", "black", "reflect"]),
)
def test_the_center_of_a_padded_image_is_the_image(height, width, channels, mode):
    images = make_pixels(3, height, width, channels)
    padding = min(height, width) - 1
    padded = pad_images(images, padding, mode, torch.full((channels,), 9, dtype=torch.uint8))
    assert padded.shape == (3, height + 2 * padding, width + 2 * padding, channels)
    corners = torch.full((3, 2), padding)
    assert torch.equal(crop_padded(padded, torch.arange(3), corners, (height, width)), images)
    assert padded[:, 0, 0].unique().tolist() == {"mean": [9], "black": [0]}.get(mode, padded[:, 0, 0].unique().tolist())


@settings(deadline=None, max_examples=40)
@given(chosen=st.lists(st.booleans(), min_size=1, max_size=8))
def test_flipping_twice_restores_the_images_and_others_stay(chosen):
    images, selected = make_pixels(len(chosen), 4, 5), torch.tensor(chosen)
    flipped = flip_images(images.clone(), selected)
    assert torch.equal(flipped[~selected], images[~selected])
    assert torch.equal(flipped[selected], images[selected].flip(2))
    assert torch.equal(flip_images(flipped, selected), images)


def test_a_crop_of_the_whole_image_resizes_nothing():
    images = make_pixels(4, 8, 8)
    augment = Augment(crop="resized", area=(1.0, 1.0), aspect=(1.0, 1.0))
    numbers = np.random.default_rng(0).random((4, NUMBERS))
    torch.testing.assert_close(crop_and_resize(images, numbers, augment), images.float(), atol=1e-3, rtol=0)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, side=st.integers(1, 12))
def test_cutout_fills_at_most_its_square_and_changes_nothing_else(seed, side):
    images, fill = make_pixels(6, 12, 12), torch.tensor([1, 2, 3], dtype=torch.uint8)
    result = Augment(cutout=side).cut(images, np.arange(6), SampleRNG(seed, 0), fill)
    changed = (result != images).any(3)
    assert (result[changed] == fill).all()
    for mask in changed:
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        assert len(rows) <= side and len(columns) <= side


def test_an_augment_that_is_off_returns_the_same_pixels():
    images, fill = make_pixels(3, 4, 4), torch.zeros(3, dtype=torch.uint8)
    assert Augment().colors(images, np.arange(3), SampleRNG(0, 0)) is images
    assert Augment().cut(images, np.arange(3), SampleRNG(0, 0), fill) is images


@settings(deadline=None, max_examples=30)
@given(strength=st.floats(0, 0.9), seed=seeds)
def test_color_jitter_of_gray_images_keeps_the_range_and_the_middle_changes_nothing(strength, seed):
    images = make_pixels(4, 5, 5).permute(0, 3, 1, 2).float()
    numbers = np.random.default_rng(seed).random((4, 3))
    jittered = jitter_colors(images, numbers, (strength,) * 3)
    assert jittered.min() >= 0 and jittered.max() <= 255
    torch.testing.assert_close(jitter_colors(images, np.full((4, 3), 0.5), (strength,) * 3), images, atol=1e-3, rtol=0)


def test_brightness_multiplies_by_the_factor():
    images = torch.full((1, 3, 2, 2), 100.0)
    assert jitter_colors(images, np.array([[1.0, 0.5, 0.5]]), (0.5, 0, 0)).unique().tolist() == [150.0]
    assert jitter_colors(images, np.array([[0.0, 0.5, 0.5]]), (0.5, 0, 0)).unique().tolist() == [50.0]


def test_full_negative_saturation_is_gray():
    images = make_pixels(2, 4, 4).permute(0, 3, 1, 2).float()
    gray = jitter_colors(images, np.zeros((2, 3)), (0, 0, 1.0))
    assert (gray.amax(1) - gray.amin(1)).max() < 1e-3
    expected = 0.299 * images[:, 0] + 0.587 * images[:, 1] + 0.114 * images[:, 2]
    torch.testing.assert_close(gray[:, 0], expected)


def test_solarize_and_posterize_by_hand():
    identity, autocontrast, solarize, posterize = OPERATIONS[:4]
    images = torch.tensor([0.0, 100.0, 200.0, 255.0]).view(1, 1, 2, 2)
    half = torch.tensor([0.5])
    assert identity(images, half) is images
    assert solarize(images, half).flatten().tolist() == [0.0, 100.0, 55.0, 0.0]
    assert posterize(images, half).flatten().tolist() == [0.0, 100.0, 200.0, 252.0]
    narrow = torch.tensor([50.0, 100.0, 75.0, 50.0]).view(1, 1, 2, 2)
    assert autocontrast(narrow, half).flatten().tolist() == [0.0, 255.0, 127.5, 0.0]


def test_randaugment_changes_each_sample_independently_of_its_batch():
    images = make_pixels(6, 8, 8).permute(0, 3, 1, 2).float()
    whole = randaugment(images, np.arange(6), SampleRNG(3, 1), 2, 9.0)
    alone = torch.cat([randaugment(images[i : i + 1], np.array([i]), SampleRNG(3, 1), 2, 9.0) for i in range(6)])
    torch.testing.assert_close(whole, alone, atol=1e-3, rtol=0)
    assert torch.equal(randaugment(images, np.arange(6), SampleRNG(3, 1), 0, 9.0), images)


@settings(deadline=None, max_examples=40)
@given(channels=st.sampled_from([1, 3, 4]), mean=st.floats(0, 1), std=st.floats(0.01, 2))
def test_normalizing_is_the_formula_and_can_be_inverted(channels, mean, std):
    pixels = make_pixels(2, 3, 4, channels)
    transform = Transform(3, 4, (mean,) * channels, (std,) * channels)
    images = transform(pixels)
    assert images.shape == (2, *transform.shape)
    expected = (pixels.double() / 255 - mean) / std
    torch.testing.assert_close(images.permute(0, 2, 3, 1).double(), expected, atol=1e-3, rtol=1e-4)
    restored = (images.permute(0, 2, 3, 1).double() * std + mean) * 255
    assert torch.equal(restored.round().to(torch.uint8), pixels)


def test_each_channel_has_its_mean_and_standard_deviation():
    images = make_pixels(5, 6, 7).numpy()
    means, stds = fit_channels(images, "standard")
    np.testing.assert_allclose(means, (images / 255).mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(stds, (images / 255).std((0, 1, 2)), rtol=1e-12)
    assert fit_channels(images, "imagenet") == (IMAGENET_MEAN, IMAGENET_STD)
    assert fit_channels(np.full((2, 3, 3, 1), 7, np.uint8), "standard")[1] == (1e-6,)


@pytest.mark.parametrize("stored", [None, [], {}, {"height": 1, "width": 1, "mean": "x", "std": [1]}, {"height": "a"}])
def test_a_stored_transform_that_is_damaged_is_an_error_of_one_line(stored):
    with pytest.raises(CheckpointError, match="not a transform; use another checkpoint") as caught:
        Transform.from_json(stored)
    assert "\n" not in str(caught.value)


def test_a_transform_of_an_old_checkpoint_crops_the_whole_image():
    stored = {"height": 8, "width": 9, "mean": [0.5], "std": [0.25]}
    assert Transform.from_json(stored) == Transform(8, 9, (0.5,), (0.25,), 1.0)


mixings = st.builds(
    Mixing,
    st.sampled_from([0.0, 0.2, 1.0]),
    st.sampled_from([None, Cutmix("constant", 0.6), Cutmix("random", 0.8), Cutmix("uniform", low=0.1, high=0.9)]),
)


@settings(deadline=None, max_examples=60)
@given(mixing=mixings, count=st.integers(2, 9), seed=seeds)
def test_weights_of_mixed_labels_are_fractions_that_sum_to_one(mixing, count, seed):
    plan = mixing.plan(count, (seed, 0, 0))
    images, labels, positions = torch.rand(count, 3, 6, 5), torch.arange(count), np.arange(count)
    mixed, targets = plan.apply(images.clone(), labels, positions, positions)
    assert mixed.shape == images.shape
    assert mixed.min() >= images.min() - 1e-6 and mixed.max() <= images.max() + 1e-6
    assert targets.labels[0].tolist() == list(range(count)), "the first label is that of the sample"
    assert (targets.weights >= 0).all()
    torch.testing.assert_close(targets.weights.sum(0), torch.ones(count))


@settings(deadline=None, max_examples=60)
@given(mixing=mixings, count=st.integers(2, 9), seed=seeds, data=st.data())
def test_a_micro_batch_needs_only_its_partners(mixing, count, seed, data):
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
    plan = mixing.plan(count, (seed, 0, 0))
    partners = plan.partners(positions)
    assert not set(partners) & set(positions) and set(partners) <= set(range(count))
    images, labels = torch.rand(count, 1, 4, 4), torch.arange(count)
    whole, _ = plan.apply(images.clone(), labels, np.arange(count), np.arange(count))
    fetched = np.concatenate((positions, partners))
    part, targets = plan.apply(images[fetched].clone(), labels[fetched], positions, fetched)
    torch.testing.assert_close(part, whole[positions])
    assert targets.labels[0].tolist() == positions.tolist()


def test_without_mixing_nothing_is_fetched_or_changed():
    plan = NO_MIXING.plan(4, (0, 0, 0))
    images = torch.rand(4, 1, 2, 2)
    assert plan.partners(np.arange(2)).size == 0
    assert plan.apply(images, torch.arange(4), np.arange(4), np.arange(4)) == (images, None)
