import numpy as np

from convolve.data.transforms.normalize import Transform
from convolve.inference.preprocess import fit_photo


def test_a_photo_is_center_cropped():
    photo = np.zeros((60, 100, 3), np.uint8)
    photo[:, 20:80] = 255
    transform = Transform(30, 30, (0.0,) * 3, (1.0,) * 3)
    resized = fit_photo(photo, transform)
    assert resized.shape == (30, 30, 3) and resized.min() == 255
    assert fit_photo(resized, transform) is resized
