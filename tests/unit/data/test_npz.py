from pathlib import Path

import numpy as np
import pytest

from convolve.data.readers.mnist import read_npz
from convolve.errors import DataError

X = np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3)
Y = np.array([0, 1, 2, 3], np.uint8)


def write(path: Path, **changes: object) -> Path:
    arrays = {"x_train": X, "y_train": Y, "x_test": X[:2], "y_test": Y[:2], **changes}
    np.savez_compressed(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def test_the_four_arrays_come_back(tmp_path: Path) -> None:
    x_train, y_train, x_test, y_test = read_npz(write(tmp_path / "mnist.npz"))
    assert np.array_equal(x_train, X)
    assert np.array_equal(y_train, Y)
    assert np.array_equal(x_test, X[:2])
    assert y_test.dtype == np.int64


def test_fortran_order_does_not_matter(tmp_path: Path) -> None:
    assert np.array_equal(read_npz(write(tmp_path / "mnist.npz", x_train=np.asfortranarray(X)))[0], X)


def test_a_missing_array_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must contain y_test.npy once, contains x_test.npy"):
        read_npz(write(tmp_path / "mnist.npz", y_test=None))


def test_images_must_be_bytes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="x_train contains int64: images must be uint8"):
        read_npz(write(tmp_path / "mnist.npz", x_train=X.astype(np.int64)))


def test_labels_must_be_whole_numbers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="y_train contains float64: must be integers"):
        read_npz(write(tmp_path / "mnist.npz", y_train=Y.astype(float)))


def test_a_label_beyond_int64_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such class"):
        read_npz(write(tmp_path / "mnist.npz", y_train=np.array([2**63, 0, 0, 0], np.uint64)))
