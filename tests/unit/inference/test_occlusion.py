"""Occlusion finds the region that a prediction depends on, with nothing but logits."""

import numpy as np
import pytest

from convolve.inference.occlusion import GRID, occlusion

REGIONS = (slice(8, 20), slice(36, 52)), (slice(44, 56), slice(4, 16))


def brightness_of_regions(pixels):
    """Logits of a model that looks at one region for each class."""
    return np.stack([pixels[:, rows, columns].mean(axis=(1, 2, 3)) for rows, columns in REGIONS], 1).astype(np.float32)


def images(channels=3, side=64):
    found = np.zeros((2, side, side, channels), np.uint8)
    for image, region in zip(found, REGIONS, strict=True):
        image[region] = 255
    return found


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_the_region_that_the_class_depends_on_is_the_warmest(channels):
    heatmaps = occlusion(brightness_of_regions, images(channels), np.array([0, 1]))
    assert heatmaps.shape == (2, 64, 64) and heatmaps.dtype == np.float32
    for heatmap, (rows, columns) in zip(heatmaps, REGIONS, strict=True):
        row, column = np.unravel_index(heatmap.argmax(), heatmap.shape)
        assert rows.start <= row < rows.stop and columns.start <= column < columns.stop
        assert heatmap.min() >= 0 and heatmap.max() == pytest.approx(1, abs=0.05)
        assert heatmap[rows, columns].mean() > 5 * heatmap.mean()


def test_an_image_without_evidence_is_cold():
    heatmaps = occlusion(brightness_of_regions, np.zeros((1, 64, 64, 3), np.uint8), np.array([0]))
    assert not heatmaps.any()


def test_an_image_smaller_than_the_grid_works_and_no_image_gives_no_heatmap():
    found = occlusion(
        lambda pixels: pixels[:, 0, 0, :].astype(np.float32), np.full((1, 2, 3, 1), 9, np.uint8), np.zeros(1, int)
    )
    assert found.shape == (1, 2, 3)
    empty = occlusion(brightness_of_regions, np.zeros((0, 64, 64, 3), np.uint8), np.zeros(0, int))
    assert empty.shape == (0, 64, 64)


def test_every_pixel_is_covered_by_some_window():
    seen = []

    def remember(pixels):
        seen.append(pixels.copy())
        return np.zeros((len(pixels), 1), np.float32)

    image = np.arange(1, 30 * 41 + 1, dtype=np.uint16).reshape(1, 30, 41, 1) % 251
    occlusion(remember, image.astype(np.uint8), np.zeros(1, int))
    batch = np.concatenate(seen)
    assert len(batch) == GRID * GRID + 1
    changed = (batch[1:] != batch[0]).any(axis=(0, 3))
    assert changed[batch[0, :, :, 0] != np.median(batch[0])].all()
