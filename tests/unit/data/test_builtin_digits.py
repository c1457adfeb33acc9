import numpy as np

from convolve.data.catalog import DIGITS, FASHION_MNIST
from convolve.data.dataset import Dataset
from convolve.data.fingerprint import compare_contents, hash_samples
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.lookup import enlarge, generated_dataset, generated_split, load_digits


def test_the_shipped_digits_are_the_published_ones() -> None:
    assert compare_contents(load_digits(), DIGITS) == "published"


def test_the_digits_have_the_form_of_mnist() -> None:
    digits = load_digits()
    assert digits.train.images.shape[1:] == (28, 28, 1)
    assert (len(digits.train), len(digits.test)) == (1500, 297)
    assert set(digits.train.labels) == set(digits.test.labels) == set(range(10))
    margin = np.ones((28, 28), bool)
    margin[4:24, 4:24] = False
    assert not digits.train.images[:, margin].any()
    assert digits.train.images.max() == 255


def test_a_flat_image_stays_flat_when_enlarged() -> None:
    for value, gray in ((16, 255), (8, 128), (0, 0)):
        large = enlarge(np.full((1, 8, 8), value, np.uint8))
        assert (large[:, 4:24, 4:24] == gray).all()


def test_enlarging_keeps_mirror_images_mirrored() -> None:
    small = np.random.default_rng(0).integers(0, 17, (3, 8, 8), np.uint8)
    assert np.array_equal(enlarge(small[:, ::-1, ::-1]), enlarge(small)[:, ::-1, ::-1])


def test_shuffled_samples_are_recognized_as_published_in_another_order() -> None:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.train))
    shuffled = InMemoryImages(digits.train.images[order], digits.train.labels[order])
    assert hash_samples(shuffled) == hash_samples(digits.train)
    dataset = Dataset("digits", shuffled, digits.test, digits.classes, "here")
    assert compare_contents(dataset, DIGITS) == "published, in another order"


def test_one_changed_pixel_or_label_is_recognized_as_different() -> None:
    digits = load_digits()
    images, labels = digits.test.images.copy(), digits.test.labels.copy()
    images[5, 10, 10] ^= 1
    labels[3] = (labels[3] + 1) % 10
    for test in (InMemoryImages(images, digits.test.labels), InMemoryImages(digits.test.images, labels)):
        assert compare_contents(Dataset("digits", digits.train, test, digits.classes, "here"), DIGITS) == "different"


def test_generated_images_depend_on_the_seed_only() -> None:
    first, again, other = (generated_split(50, 32, 3, 7, seed) for seed in (1, 1, 2))
    assert first.images.shape == (50, 32, 32, 3)
    assert first.images.dtype == np.uint8
    assert first.labels.dtype == np.int64
    assert first.labels.min() >= 0
    assert first.labels.max() < 7
    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.images, other.images)


def test_a_generated_data_set_has_the_counts_and_classes_of_the_real_one() -> None:
    dataset = generated_dataset(FASHION_MNIST, seed=0)
    assert (len(dataset.train), len(dataset.test), dataset.train.images.shape[1:]) == (60_000, 10_000, (28, 28, 1))
    assert dataset.classes == FASHION_MNIST.classes
