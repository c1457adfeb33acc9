import gzip
from pathlib import Path

import numpy as np
import pytest

from convolve.data.loader.in_memory import check_images
from convolve.data.readers.mnist import pack_idx, read_images, read_labels
from convolve.errors import DataError

IMAGES = np.arange(5 * 7 * 6, dtype=np.uint8).reshape(5, 7, 6)
LABELS = np.array([3, 1, 4, 1, 5])


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["raw", "gzip"])
@pytest.mark.parametrize("name", ["images", "images.gz", "images.txt"])
def test_an_idx_file_is_recognized_by_content_under_any_name(tmp_path: Path, pack, name: str) -> None:
    (tmp_path / name).write_bytes(pack(pack_idx(IMAGES)))
    assert np.array_equal(read_images(tmp_path / name), IMAGES)


def test_labels_come_back_as_int64(tmp_path: Path) -> None:
    (tmp_path / "labels").write_bytes(pack_idx(LABELS))
    labels = read_labels(tmp_path / "labels")
    assert labels.dtype == np.int64
    assert np.array_equal(labels, LABELS)


def test_the_header_is_that_of_the_published_files() -> None:
    assert pack_idx(IMAGES)[:16].hex() == "00000803000000050000000700000006"
    assert pack_idx(LABELS)[:8].hex() == "0000080100000005"


def test_labels_given_as_images_are_rejected_with_the_magic_that_was_found(tmp_path: Path) -> None:
    (tmp_path / "labels").write_bytes(pack_idx(LABELS))
    with pytest.raises(DataError, match="starts with 00000801.*starts with 00000803"):
        read_images(tmp_path / "labels")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: cannot read"):
        read_images(tmp_path / "absent")


def test_a_split_needs_as_many_labels_as_images() -> None:
    with pytest.raises(DataError, match="here: 5 images but labels of shape"):
        check_images(IMAGES, LABELS[:4], classes=10, source="here")


def test_a_split_rejects_a_label_outside_the_classes_and_names_the_sample() -> None:
    with pytest.raises(DataError, match="here: label 4 of sample 2: must be 0 to 3"):
        check_images(IMAGES, np.minimum(LABELS, 4), classes=4, source="here")


def test_a_split_rejects_negative_labels_if_any_class_is_accepted() -> None:
    with pytest.raises(DataError, match="label -1 of sample 0"):
        check_images(IMAGES, LABELS - 4, classes=None, source="here")


@pytest.mark.parametrize("shape", [(5, 7, 6, 0), (5, 7, 6, 5000), (5, 7), (5, 0, 6), (5, 5000, 1)])
def test_a_split_rejects_implausible_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="here: image"):
        check_images(np.zeros(shape, np.uint8), LABELS, classes=10, source="here")


def test_a_split_has_a_channel_axis_and_a_length() -> None:
    split = check_images(IMAGES, LABELS, classes=10, source="here")
    assert split.images.shape == (5, 7, 6, 1)
    assert len(split) == 5
