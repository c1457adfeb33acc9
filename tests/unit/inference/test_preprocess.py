"""Images of any kind become the input of a model, in this process or in a sandbox."""

import io

import numpy as np
import pytest
from PIL import Image

from convolve.inference.preprocess import DecodeRequest, InputSpec, decode_input, fit_photo, preprocess


def test_a_photo_is_center_cropped():
    photo = np.zeros((60, 100, 3), np.uint8)
    photo[:, 20:80] = 255
    spec = InputSpec("photo", 30, 30, 3, 1.0)
    resized = fit_photo(photo, spec)
    assert resized.shape == (30, 30, 3) and resized.min() == 255
    assert fit_photo(resized, spec) is resized


@pytest.mark.parametrize("spec", [InputSpec("photo", 30, 40, 3, 0.875), InputSpec("digit", 28, 28, 1, 1.0)])
def test_a_sandbox_gets_the_pixels_that_this_process_would_compute(spec):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 50, spec.channels), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if spec.channels == 1 else pixels).save(file, "PNG")
    request = DecodeRequest(file.getvalue(), "a.png", spec, invert=False)
    assert DecodeRequest.unpack(request.pack()) == request
    assert decode_input(request.pack()) == preprocess(pixels, spec, invert=False).tobytes()
