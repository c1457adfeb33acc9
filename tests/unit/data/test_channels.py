"""Images of 1, 3, 4 and 13 channels through data, augmentation, normalization, models, export and serving."""

import io

import numpy as np
import pytest
from PIL import Image

import convolve
from convolve.data.image_io import decode_image
from convolve.errors import ConfigError, ConvolveError, DataError

CHANNELS = (1, 3, 4, 13)


class Bands:
    """Bytes [16, 16, C]; the class decides which half of the channels is bright."""

    classes = ("low", "high")

    def __init__(self, channels, count=24):
        self.channels, self.count = channels, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image = np.full((16, 16, self.channels), 40, np.uint8)
        image[:8] += np.uint8(150 * (index % 2))
        image[..., 0] += np.uint8(index)
        return image, index % 2


def train_bands(folder, channels, **options):
    settings = {"batch_size": 8, "epochs": 1, "log_dir": folder, "threads": 1, "normalization": "standard"}
    data = (Bands(channels), Bands(channels, 8))
    return convolve.train(data, "resnet20-cifar", **{**settings, **options})


def encode(pixels):
    file = io.BytesIO()
    np.save(file, pixels)
    return file.getvalue()


@pytest.mark.parametrize("channels", CHANNELS)
def test_a_run_has_any_number_of_channels(channels, tmp_path):
    run = train_bands(tmp_path, channels, augment="pad-crop-flip", cutout=4, mixup_alpha=0.2)
    classifier = run.load()
    assert classifier.input_shape == (channels, 16, 16)
    pixels = Bands(channels)[3][0]
    direct = classifier.probabilities(pixels[None])[0]
    if channels > 1:  # gray images of any size are prepared like digits
        answer = classifier.predict(pixels, top=2)
        assert dict(answer.top)[answer.label] == pytest.approx(float(direct.max()), abs=1e-6)
    if channels > 3:
        assert classifier.predict(encode(pixels)).label == classifier.predict(pixels).label
        assert classifier.explain(pixels).mode == "RGB"
    run.report()
    assert (run.path / "report.html").is_file()


def test_an_export_of_13_channels_predicts_like_the_run(tmp_path):
    run = train_bands(tmp_path, 13)
    exported = convolve.load(run.export("onnx"))
    larger = np.repeat(np.repeat(Bands(13)[3][0], 2, 0), 2, 1)
    answers = [classifier.predict(larger).probability for classifier in (run.load(), exported)]
    assert answers[0] == pytest.approx(answers[1], abs=1e-5)


def test_four_channels_are_read_from_a_file_with_transparency():
    pixels = np.arange(4 * 4 * 4, dtype=np.uint8).reshape(4, 4, 4)
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(file, "PNG")
    assert np.array_equal(decode_image(file.getvalue(), "x.png", channels=4), pixels)
    with pytest.raises(DataError, match="x.png: 4 channels; the model takes 13, give them as npy"):
        decode_image(file.getvalue(), "x.png", channels=13)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((4, 4, 5), np.uint8), "5 channels; the model takes 13"),
        (np.zeros((4, 4), np.uint8), r"uint8 \[4, 4\]; give uint8 pixels"),
        (np.zeros((4, 4, 13), np.float32), "float32"),
        (np.asfortranarray(np.zeros((4, 4, 13), np.uint8)), "in C order"),
    ],
)
def test_a_wrong_array_is_an_error(pixels, message):
    with pytest.raises(DataError, match=message):
        decode_image(encode(pixels), "x.npy", channels=13)


def test_a_header_that_promises_more_than_the_file_allocates_nothing():
    data = bytearray(encode(np.zeros((4, 4, 13), np.uint8)))
    data = bytes(data).replace(b"(4, 4, 13)", b"(9, 9, 13)")
    with pytest.raises(DataError, match="208 bytes for an array"):
        decode_image(data, "x.npy", channels=13)
    with pytest.raises(ConvolveError):
        decode_image(data, "x.npy", channels=13, largest=10)


def test_color_augmentation_of_other_channels_is_an_error(tmp_path):
    with pytest.raises(
        ConfigError, match="--color-jitter: changes colors, but the images have 4 channels|color_jitter"
    ):
        train_bands(tmp_path, 4, color_jitter=(0.1, 0.1, 0.1))
    with pytest.raises(ConfigError, match="only for color images"):
        train_bands(tmp_path, 4, normalization="imagenet")
