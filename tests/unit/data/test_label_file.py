"""Tables with several labels per image."""

import numpy as np
import pytest

from convolve.config.schema import DataConfig
from convolve.data.build import select_samples
from convolve.data.lookup import open_dataset, open_scored
from convolve.data.readers.label_file import read_label_file
from convolve.data.sampling import count_labels, find_strata
from convolve.download import ignore_progress
from convolve.errors import DataError
from drawn_photos import write_photos
from labeled_shapes import COLORS, write_folder

CELLS = {
    "heading": "file,label,label,label,split\na.png,red,blue,,train\nb.png,,,,val\nc.png,blue,,,test\n",
    "heading of labels": "image,label_1,label_2,split\na.png,red,blue,train\nb.png,,,val\nc.png,blue,,test\n",
    "lines of any length": "a.png,red,blue,train\nb.png,val\nc.png,blue,test\n",
    "repeated labels": "a.png,red,blue,red,train\nb.png,val\nc.png,blue,blue,test\n",
}


@pytest.mark.parametrize("text", CELLS.values(), ids=CELLS)
def test_an_image_has_any_number_of_labels(tmp_path, text):
    path = tmp_path / "labels.csv"
    path.write_text(text)
    table = read_label_file(path)
    assert table.task == "multi-label" and table.classes == ("blue", "red")
    assert [(set(row.labels), row.split) for row in table.rows] == [
        ({"red", "blue"}, "train"),
        (set(), "validation"),
        ({"blue"}, "test"),
    ]


def test_one_label_per_image_is_a_class_unless_the_task_says_otherwise(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("a.png,red\nb.png,blue\n")
    assert read_label_file(path).task == "single-label"
    assert read_label_file(path, "multi-label").task == "multi-label"


def test_wrong_tasks_are_errors_with_the_line(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("file,label,label\na.png,red,\nb.png,blue,red\n")
    with pytest.raises(DataError, match="line 3: 2 labels; one image has one class here"):
        read_label_file(path, "single-label")
    with pytest.raises(DataError, match="--task soft-label: .* has labels, not probabilities"):
        read_label_file(path, "soft-label")


def open_shapes(root, **options):
    return open_dataset(DataConfig(data_dir=root, **options), announce=print, progress=ignore_progress)


@pytest.mark.parametrize("cached", [True, False])
def test_labels_are_a_matrix_in_every_split(tmp_path, cached):
    root = write_folder(tmp_path / "shapes", 30)
    for _ in range(2):  # the second time from the cached index
        dataset = open_shapes(root, dataset_cache=cached)
        assert dataset.task == "multi-label" and dataset.classes == COLORS
        assert {name: reader.labels.shape for name, reader in dataset.splits.items()} == {
            "train": (20, 3),
            "validation": (5, 3),
            "test": (5, 3),
        }
        assert set(np.unique(dataset.train.labels)) == {0, 1}
    assert dataset.train.image_shape == ((16, 16, 3) if cached else None)
    assert np.array_equal(dataset.train.take(np.array([3, 1])).labels, dataset.train.labels[[3, 1]])


def test_a_table_without_splits_is_divided_by_the_rarest_label(tmp_path):
    dataset = open_shapes(write_folder(tmp_path / "shapes", 60, splits=False), test_fraction=0.3)
    assert len(dataset.train) + len(dataset.test) == 60 and dataset.task == "multi-label"
    assert (count_labels(dataset.test.labels, 3) > 0).all() and (count_labels(dataset.train.labels, 3) > 0).all()
    held = select_samples(dataset, DataConfig(validation_fraction=0.25)).validation
    assert held is not None and (count_labels(held.labels, 3) > 0).all()


def test_the_stratum_of_an_image_is_its_rarest_label():
    labels = np.array([[1, 1, 0], [1, 0, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 0]])
    assert find_strata(labels).tolist() == [1, 2, 0, -1, 2, 1]
    assert find_strata(np.array([2, 0])).tolist() == [2, 0]


def test_another_folder_is_scored_by_the_names_of_labels(tmp_path):
    root = write_folder(tmp_path / "shapes", 12, splits=False)
    wider = ("amber", *COLORS)
    found = open_scored(root, None, wider, ignore_progress, "multi-label")
    plain = open_scored(root, None, COLORS, ignore_progress, "multi-label")
    assert found.classes == wider and not found.test.labels[:, 0].any()
    assert np.array_equal(found.test.labels[:, 1:], plain.test.labels)
    with pytest.raises(DataError, match="one image has one class here"):
        open_scored(root, None, COLORS, ignore_progress)


def test_class_folders_and_known_data_sets_have_one_class(tmp_path):
    photos = write_photos(tmp_path / "photos", {"cat": 3, "dog": 3})
    with pytest.raises(DataError, match="--task multi-label: each image of .* has one class; list several labels in"):
        open_shapes(photos, task="multi-label")
    with pytest.raises(DataError, match="--task multi-label: each image of digits has one class"):
        open_dataset(DataConfig(dataset="digits", task="multi-label"), announce=print, progress=ignore_progress)
