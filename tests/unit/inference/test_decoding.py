"""Batches of images for a sandbox: each image gets its pixels or its error, and garbage from a child is rejected."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from convolve.errors import DataError, ImageTooLargeError, SandboxError
from convolve.inference import decoding
from convolve.inference.decoding import DecodeRequest, decode_inputs, pack_requests, unpack_results
from convolve.inference.preprocess import InputSpec, preprocess

PHOTO = InputSpec("photo", 30, 40, 3, 0.875)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return file.getvalue()


def decode(requests):
    return unpack_results(decode_inputs(pack_requests(requests)), requests[0].spec, len(requests))


@pytest.mark.parametrize("spec", [PHOTO, InputSpec("digit", 28, 28, 1, 1.0)])
def test_a_sandbox_gets_the_pixels_that_this_process_would_compute(spec):
    images = np.random.default_rng(0).integers(0, 256, (3, 60, 50, spec.channels), np.uint8)
    found = decode([DecodeRequest(png(image), "a.png", spec, invert=False) for image in images])
    for image, pixels in zip(images, found, strict=True):
        assert np.array_equal(pixels, preprocess(image, spec, invert=False))


def test_an_image_over_the_limit_or_damaged_is_an_error_with_its_name():
    good = np.full((40, 50, 3), 7, np.uint8)
    large = png(np.zeros((41, 50, 3), np.uint8))
    requests = [
        DecodeRequest(data, f"upload {number}", PHOTO, max_pixels=2000)
        for number, data in enumerate((large, png(good)[:60], png(good), b""))
    ]
    found = decode(requests)
    assert [type(item) for item in found] == [ImageTooLargeError, DataError, np.ndarray, DataError]
    assert [str(found[number]).partition(":")[0] for number in (0, 1, 3)] == ["upload 0", "upload 1", "upload 3"]


@settings(deadline=None)
@given(images=st.lists(st.tuples(st.binary(max_size=60), st.text(max_size=20)), min_size=1, max_size=4))
def test_any_bytes_and_names_get_one_error_each(images):
    found = decode([DecodeRequest(data, name, PHOTO, max_pixels=1234) for data, name in images])
    assert [type(item) for item in found] == [DataError] * len(images)


def test_images_after_a_slow_one_are_not_reached(monkeypatch):
    monkeypatch.setattr(decoding, "BATCH_SECONDS", -1.0)
    requests = [DecodeRequest(png(np.zeros((9, 9, 3), np.uint8)), "a.png", PHOTO)] * 3
    first, *others = decode(requests)
    assert isinstance(first, np.ndarray) and others == [None, None]


@pytest.mark.parametrize(
    "result",
    [b"", b"[]", b"[0]", b"[0]\nxy", b"[1, 1]\n", b"{}\n", b"7\n", b"[[1]]\n", b"[null]\n", b'["ab"]\nx', b"[" * 9999],
)
def test_garbage_of_a_child_is_rejected(result):
    with pytest.raises(SandboxError, match="garbage"):
        unpack_results(result, PHOTO, 1)
