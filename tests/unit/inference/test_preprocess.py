"""Images of any size become model input: photos are cropped and resized, digits prepared as in MNIST."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convolve.data.transforms.normalize import Transform
from convolve.errors import CheckpointError
from convolve.inference.metadata import ModelMetadata
from convolve.inference.preprocess import InputSpec, fit_digit, fit_photo, preprocess


def photo_spec(side=30, crop=1.0):
    return InputSpec("photo", side, side, 3, crop)


def make_metadata(fit, transform, classes=("a", "b")):
    return ModelMetadata("lenet5", classes, transform, fit, 3, "0.2")


def draw_ink(height, width, box, ink=255, paper=0):
    """Return an image of paper with a filled box (top, left, bottom, right) of ink."""
    top, left, bottom, right = box
    image = np.full((height, width, 1), paper, np.uint8)
    image[top:bottom, left:right] = ink
    return image


def test_a_photo_is_center_cropped():
    photo = np.zeros((60, 100, 3), np.uint8)
    photo[:, 20:80] = 255
    resized = fit_photo(photo, photo_spec())
    assert resized.shape == (30, 30, 3) and resized.min() == 255
    assert fit_photo(resized, photo_spec()) is resized


def test_a_crop_fraction_removes_the_margins():
    photo = np.zeros((100, 100, 3), np.uint8)
    photo[20:80, 20:80] = 200
    assert fit_photo(photo, photo_spec(crop=0.6)).min() == 200
    assert fit_photo(photo, photo_spec(crop=1.0)).min() == 0


@settings(deadline=None, max_examples=40)
@given(height=st.integers(1, 80), width=st.integers(1, 80), level=st.integers(0, 255))
def test_a_constant_photo_of_any_size_stays_constant(height, width, level):
    resized = fit_photo(np.full((height, width, 3), level, np.uint8), photo_spec(16))
    assert resized.shape == (16, 16, 3) and (resized == level).all()


def test_a_gray_photo_keeps_one_channel():
    spec = InputSpec("photo", 8, 8, 1, 1.0)
    assert fit_photo(np.zeros((20, 30, 1), np.uint8), spec).shape == (8, 8, 1)


def test_the_metadata_choose_between_digit_and_photo():
    image = draw_ink(60, 40, (10, 10, 50, 30))
    transform = Transform(28, 28, (0.5,), (0.5,))
    digit = preprocess(image, make_metadata("digit", transform).input_spec)
    assert np.array_equal(digit, fit_digit(image, 28, None))
    photo = preprocess(image, make_metadata("photo", transform).input_spec)
    assert photo.shape == digit.shape and not np.array_equal(photo, digit)


@settings(deadline=None, max_examples=60)
@given(
    height=st.integers(12, 90),
    width=st.integers(12, 90),
    ink=st.integers(60, 255),
    paper=st.integers(0, 50),
    data=st.data(),
)
def test_a_box_of_ink_fills_20_of_28_pixels_and_keeps_its_contrast(height, width, ink, paper, data):
    top, left = data.draw(st.integers(2, height - 6)), data.draw(st.integers(2, width - 6))
    bottom, right = data.draw(st.integers(top + 3, height - 2)), data.draw(st.integers(left + 3, width - 2))
    digit = fit_digit(draw_ink(height, width, (top, left, bottom, right), ink, paper), 28, invert=False)
    if (height, width) == (28, 28):
        return
    rows, columns = np.nonzero(digit[..., 0])
    spans = np.ptp(rows) + 1, np.ptp(columns) + 1
    assert digit.shape == (28, 28, 1) and max(spans) == 20
    assert digit.max() == ink - paper
    expected = (bottom - top) / (right - left)
    assert spans[0] / spans[1] == pytest.approx(expected, rel=0.5) or min(spans) <= 4


@settings(deadline=None, max_examples=40)
@given(shift=st.tuples(st.integers(-8, 8), st.integers(-8, 8)))
def test_moving_the_ink_does_not_change_the_digit(shift):
    box = np.array((20, 24, 44, 38))
    moved = box + np.array((*shift, *shift))
    images = [draw_ink(64, 64, tuple(int(x) for x in each)) for each in (box, moved)]
    assert np.array_equal(*(fit_digit(image, 28, None) for image in images))


def test_dark_ink_is_detected_from_the_border_and_can_be_forced():
    dark = draw_ink(50, 50, (10, 15, 40, 35), ink=20, paper=230)
    light = draw_ink(50, 50, (10, 15, 40, 35), ink=235, paper=25)
    assert np.array_equal(fit_digit(dark, 28, None), fit_digit(light, 28, None))
    assert np.array_equal(fit_digit(dark, 28, True), fit_digit(dark, 28, None))
    assert not np.array_equal(fit_digit(dark, 28, False), fit_digit(dark, 28, None))


def test_faint_noise_on_the_paper_is_not_ink():
    clean = draw_ink(60, 60, (20, 20, 50, 40), ink=240)
    noise = np.random.default_rng(0).integers(0, 12, clean.shape).astype(np.uint8)
    fitted = fit_digit(np.maximum(clean, noise), 28, None)
    rows, columns = np.nonzero(fitted[..., 0])
    assert (np.ptp(rows) + 1, np.ptp(columns) + 1) == (20, 13)


@pytest.mark.parametrize("level", [0, 200, 255])
def test_an_image_without_ink_is_empty(level):
    assert not fit_digit(np.full((40, 30, 1), level, np.uint8), 28, None).any()


def test_colors_are_weighted_by_their_luminance():
    image = np.zeros((28, 28, 3), np.uint8)
    image[10, 10], image[10, 11], image[10, 12] = (200, 0, 0), (0, 200, 0), (0, 0, 200)
    assert fit_digit(image, 28, False)[10, 10:13, 0].tolist() == [60, 117, 23]


def test_metadata_survive_an_exported_file():
    transform = Transform(30, 30, (0.0,) * 3, (1.0,) * 3, 0.875)
    metadata = make_metadata("photo", transform)
    assert ModelMetadata.from_json(metadata.to_json(), "model.onnx") == metadata
    assert metadata.input_spec == photo_spec(crop=0.875)
    strings = metadata.to_strings()
    assert (strings["shape"], strings["fit"], strings["crop"]) == ("30 30 3", "photo", "0.875")
    assert strings["classes"] == "a\nb"


def test_a_line_break_in_a_class_name_does_not_add_a_class():
    metadata = make_metadata("photo", Transform(8, 8, (0.5,), (0.5,)), ("a\nb", " c "))
    assert metadata.to_strings()["classes"] == "a b\nc"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9, "fit": "photo"}', '{"format": 1, "fit": "poem"}'])
def test_damaged_metadata_name_the_file(text):
    with pytest.raises(CheckpointError, match=r"model\.onnx"):
        ModelMetadata.from_json(text, "model.onnx")
