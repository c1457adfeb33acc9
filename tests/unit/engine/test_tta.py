"""Answers that are averaged over views of an image."""

import pytest
import torch

from convolve.engine.evaluate import average_views


def corner(images):
    """The pixel at the top left, as if it were a logit."""
    return images[:, :, 0, 0]


@pytest.fixture
def image():
    return torch.arange(16.0).view(1, 1, 4, 4)


def test_one_view_is_the_image(image):
    assert average_views(corner, 1) is corner


def test_two_views_are_the_image_and_its_mirror_image(image):
    assert average_views(corner, 2)(image).item() == (0 + 3) / 2


def test_six_views_are_weighed_by_hand(image):
    """Moved down and right, the corner shows the reflected pixel (1, 1); moved up and left it is the pixel (1, 1)."""
    in_place = (0 + 3) / 2
    down, up = (5 + 6) / 2, (5 + 6) / 2
    assert average_views(corner, 6)(image).item() == (in_place + (down + up) / 2) / 2


def test_shifted_views_move_by_one_pixel_in_each_direction(image):
    seen = []

    def look(images):
        seen.append(images)
        return corner(images)

    average_views(look, 6)(image)
    assert len(seen) == 6
    assert any(torch.equal(view[..., :-1, :-1], image[..., 1:, 1:]) for view in seen)
    assert any(torch.equal(view[..., 1:, 1:], image[..., :-1, :-1]) for view in seen)


@pytest.mark.parametrize("views", [1, 2, 6])
def test_a_flip_invariant_model_has_the_same_logits(views):
    images = torch.randn(5, 3, 8, 8)
    constant = torch.randn(1, 10)
    assert torch.equal(average_views(lambda x: constant.expand(len(x), -1), views)(images), constant.expand(5, -1))


@pytest.mark.parametrize("views", [1, 2, 6])
def test_a_stage_without_logits_returns_none(views, image):
    assert average_views(lambda images: None, views)(image) is None
