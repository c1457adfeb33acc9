"""Sample images of a run: the best of each class, bounded, and read back with distrust."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from convolve.data.lookup import load_digits
from convolve.errors import CheckpointError
from convolve.inference.classifier import LoadOptions, choose_model, load_classifier
from convolve.run_files import SAMPLES_FILE
from convolve.runs.samples import MAX_SAMPLES, PER_CLASS, SampleCollector, has_samples, read_samples, write_samples


def decode(url):
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
        return image.format, np.asarray(image)


def collect(classes, batches):
    collector = SampleCollector(classes)
    for logits, labels, images in batches:
        rows = collector.select(logits, labels)
        collector.add(logits, labels, {row: images[row] for row in rows})
    return collector.result()


def random_batches(count, classes, batch):
    random = np.random.default_rng(0)
    logits = random.normal(size=(count, classes)).astype(np.float32)
    labels = random.integers(0, classes, count)
    images = np.arange(count, dtype=np.uint8)[:, None, None, None] + np.zeros((count, 2, 2, 1), np.uint8)
    rows = [slice(start, start + batch) for start in range(0, count, batch)]
    return logits, labels, [(logits[row], labels[row], images[row]) for row in rows]


@pytest.mark.parametrize("batch", [1, 7, 200])
def test_the_images_with_the_highest_probability_of_their_class_are_kept_in_any_batches(batch):
    logits, labels, batches = random_batches(200, 4, batch)
    found = collect(("a", "b", "c", "d"), batches)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    truth = (powers / powers.sum(axis=1, keepdims=True))[np.arange(200), labels]
    for number, name in enumerate("abcd"):
        rows = np.flatnonzero(labels == number)
        best = rows[np.argsort(-truth[rows], kind="stable")][:PER_CLASS]
        assert [int(pixels[0, 0, 0]) for pixels in found[name]] == best.tolist()


@pytest.mark.parametrize("classes", [2, 40, 41, 120, 121, 1000])
def test_the_number_of_images_is_bounded(classes):
    labels = np.repeat(np.arange(classes), 4)
    logits = np.eye(classes, dtype=np.float32)[labels]
    found = collect(tuple(map(str, range(classes))), [(logits, labels, np.zeros((len(labels), 1, 1, 1), np.uint8))])
    assert sum(map(len, found.values())) <= MAX_SAMPLES
    assert bool(found) == (classes <= MAX_SAMPLES)


def test_a_small_image_is_stored_exactly_and_a_photo_as_jpeg(tmp_path):
    random = np.random.default_rng(0)
    small, gray = random.integers(0, 256, (32, 32, 3), np.uint8), random.integers(0, 256, (28, 28, 1), np.uint8)
    photo = np.full((224, 224, 3), 90, np.uint8)
    write_samples(tmp_path, {"b": [small, photo], "a": [gray], "many channels": [np.zeros((8, 8, 4), np.uint8)]})
    found = read_samples(tmp_path, ("a", "b", "many channels"))
    assert list(found) == ["a", "b"]
    (kind, pixels), (other, shown) = map(decode, found["b"])
    assert kind == "PNG" and np.array_equal(pixels, small)
    assert other == "JPEG" and np.abs(shown.astype(int) - photo).max() <= 2
    assert np.array_equal(decode(found["a"][0])[1], gray[..., 0])


def test_a_run_has_samples_that_its_model_recognizes(digits_run):
    classifier = load_classifier(choose_model(digits_run), LoadOptions("torch", 1))
    classes = classifier.metadata.classes
    found = read_samples(digits_run, classes)
    assert has_samples(digits_run) and list(found) == list(classes)
    test = load_digits().test
    for number, urls in enumerate(found.values()):
        assert len(urls) == PER_CLASS
        pixels = np.stack([decode(url)[1] for url in urls])[..., None]
        assert (classifier.classify(pixels).argmax(axis=1) == number).all()
        originals = test.images[test.labels == number]
        assert all((originals == image).all(axis=(1, 2, 3)).any() for image in pixels)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"format": 1}',
        b'{"samples": []}',
        b'{"samples": {"a": 1}}',
        b'{"samples": {"a": ["https://example.org/x.png"]}}',
        b'{"samples": {"a": ["data:text/html;base64,PHNjcmlwdD48L3NjcmlwdD4="]}}',
        b'{"samples": {"a": ["data:image/svg+xml;base64,PHNjcmlwdD48L3NjcmlwdD4="]}}',
        b'{"samples": {"a": ["data:image/png;base64,AAAAAAAAAAAAAAAA\\" onerror=x"]}}',
        b"[" * 100_000,
        b" " * ((16 << 20) + 1),
    ],
)
def test_a_damaged_or_made_up_file_is_one_line(tmp_path, content):
    (tmp_path / SAMPLES_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^[^\n]*samples\.json: damaged; remove it and run `convolve report`$"):
        read_samples(tmp_path, ("a",))


def test_only_images_of_classes_are_shown(tmp_path):
    assert read_samples(tmp_path, ("a",)) == {}
    url = f"data:image/png;base64,{'A' * 20}"
    content = {"samples": {"b": [url] * 9, "other": [url], "a": [url]}}
    (tmp_path / SAMPLES_FILE).write_text(json.dumps(content))
    assert read_samples(tmp_path, ("a", "b")) == {"a": [url], "b": [url] * PER_CLASS}


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path):
    (tmp_path / "secret.json").write_text(json.dumps({"samples": {}}))
    (tmp_path / SAMPLES_FILE).symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match="a symbolic link"):
        read_samples(tmp_path, ("a",))
