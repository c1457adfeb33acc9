"""Splits of folders: stratified, stable when photos are added, duplicates together; and every layout that is read."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from convolve.config.loading import parse
from convolve.config.schema import DataConfig
from convolve.data.lookup import open_dataset
from convolve.data.prepare import PrepareOptions, prepare_images
from convolve.data.readers.detect import open_images
from convolve.data.readers.splits import SplitOptions, assign_folds, held_out
from convolve.download import ignore_progress
from convolve.errors import ConfigError, DataError
from drawn_photos import draw_photo, write_photos
from mat_files import pack_meta


def opened(root, **options):
    found = open_images(root, str(root), ignore_progress, SplitOptions(**options))
    assert found is not None
    return found


def names(reader):
    return {str(Path(reader.name(row)).relative_to(reader.root)) for row in range(len(reader))}


def keys(count, start=0):
    return [b"%16d" % number for number in range(start, start + count)]


def test_every_class_gives_its_part():
    labels = np.repeat([0, 1, 2, 3], [400, 60, 12, 2])
    held = held_out(labels, keys(len(labels)), np.arange(len(labels)), 0.1)
    counts = [int(held[labels == label].sum()) for label in range(4)]
    assert 27 <= counts[0] <= 55 and 2 <= counts[1] <= 12 and 1 <= counts[2] <= 3 and counts[3] == 1


def test_added_images_move_no_old_one():
    labels = np.zeros(300, np.int64)
    before = held_out(labels, keys(300), np.arange(300), 0.2)
    after = held_out(np.zeros(400, np.int64), keys(400), np.arange(400), 0.2)
    assert (before == after[:300]).all()


def test_a_group_is_never_divided():
    groups = np.repeat(np.arange(50) * 4, 4)
    labels = np.arange(200) % 2
    for fraction in (0.1, 0.5, 0.9):
        held = held_out(labels, keys(200), groups, fraction).reshape(50, 4)
        assert (held.all(1) | ~held.any(1)).all() and held.any() and not held.all()


def test_a_class_of_one_image_stays_in_training():
    held = held_out(np.array([0, 1, 1]), keys(3), np.arange(3), 0.9)
    assert not held[0] and held.sum() == 1


def test_folds_are_disjoint_complete_and_stratified():
    labels = np.repeat([0, 1], [50, 10])
    folds = assign_folds(labels, keys(60), np.arange(60), 5)
    for label, count in ((0, 10), (1, 2)):
        assert np.bincount(folds[labels == label], minlength=5).tolist() == [count] * 5


def test_a_folder_without_a_split_keeps_copies_together_and_renamed_files_in_place(tmp_path):
    root = write_photos(tmp_path / "photos", {"a": 30, "b": 30})
    for number in range(0, 30, 3):
        shutil.copy(root / "a" / f"photo {number:03d}.jpg", root / "a" / f"copy {number}.jpg")
        draw_photo(1, number).resize((60, 45)).save(root / "b" / f"small {number}.png")
    test = names(opened(root).test)
    assert 2 <= len(test) <= 30
    for number in range(0, 30, 3):
        assert (f"a/photo {number:03d}.jpg" in test) == (f"a/copy {number}.jpg" in test)
        assert (f"b/photo {number:03d}.jpg" in test) == (f"b/small {number}.png" in test)
    for path in list((root / "a").iterdir()):
        path.rename(path.with_name(f"renamed {path.name}"))
    assert {name.replace("renamed ", "") for name in names(opened(root).test)} == test


def test_validation_selects_and_test_is_scored_if_both_exist(tmp_path):
    for split, first in (("train", 0), ("val", 100), ("test", 200)):
        write_photos(tmp_path / split, {"a": 3, "b": 2}, first=first)
    dataset = opened(tmp_path)
    assert {name: len(reader) for name, reader in dataset.splits.items()} == {"train": 5, "validation": 5, "test": 5}
    assert all("test/" in name for name in names(dataset.test))
    assert all("val/" in name for name in names(dataset.validation))


def test_validation_is_held_out_from_train_if_only_a_test_split_exists(tmp_path):
    write_photos(tmp_path / "train", {"a": 30, "b": 20})
    write_photos(tmp_path / "test", {"a": 3, "b": 2}, first=100)
    dataset = opened(tmp_path, validation_fraction=0.2)
    assert len(dataset.train) + len(dataset.validation) == 50 and 4 <= len(dataset.validation) <= 18
    assert set(dataset.validation.labels.tolist()) == {0, 1}
    assert not names(dataset.train) & names(dataset.validation)
    assert len(opened(tmp_path, select=False).train) == 50


def test_a_folder_without_splits_has_three_on_request(tmp_path):
    root = write_photos(tmp_path / "photos", {"a": 30, "b": 30})
    plain, three = opened(root, fraction=0.2), opened(root, fraction=0.2, validation_fraction=0.2)
    assert plain.validation is None and names(plain.test) == names(three.test)
    assert names(three.train) | names(three.validation) == names(plain.train)
    assert 4 <= len(three.validation) <= 20 and not names(three.train) & names(three.validation)


def test_train_and_val_are_read_as_before(tmp_path):
    write_photos(tmp_path / "train", {"a": 3, "b": 2})
    write_photos(tmp_path / "val", {"a": 1, "b": 1}, first=100)
    dataset = opened(tmp_path)
    assert dataset.validation is None and dataset.test_name == "validation"
    assert (len(dataset.train), len(dataset.test)) == (5, 2)


def test_runs_of_version_0_1_keep_their_split(tmp_path):
    write_photos(tmp_path / "train", {"a": 3, "b": 2})
    write_photos(tmp_path / "test", {"a": 1, "b": 1}, first=100)
    config = parse(f"data-dir: {tmp_path}\n", "old config.yml").data
    assert config.split_rule == "name" and DataConfig().split_rule == "content"
    dataset = open_dataset(config, announce=print, progress=ignore_progress)
    assert dataset.validation is None and len(dataset.train) == 5


def test_only_the_scored_split_is_read_on_request(tmp_path):
    write_photos(tmp_path / "train", {"a": 3, "b": 2})
    write_photos(tmp_path / "val", {"a": 1, "b": 1}, first=100)
    (tmp_path / "train" / "a").chmod(0)
    dataset = opened(tmp_path, train=False)
    assert (len(dataset.train), len(dataset.test)) == (0, 2)


def test_folds_cover_a_folder(tmp_path):
    root = write_photos(tmp_path / "photos", {"a": 6, "b": 6})
    parts = [names(opened(root, fold=(fold, 3)).test) for fold in range(3)]
    assert set.union(*parts) == names(opened(root, fold=(0, 3)).train) | parts[0]
    assert sum(map(len, parts)) == 12 and all(len(part) == 4 for part in parts)


def test_folds_of_a_folder_with_a_validation_split_are_an_error(tmp_path):
    write_photos(tmp_path / "train", {"a": 3, "b": 2})
    write_photos(tmp_path / "val", {"a": 1, "b": 1}, first=100)
    with pytest.raises(DataError, match="--folds 3: .* has a validation split"):
        opened(tmp_path, fold=(0, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"fold": 1}, "--fold 1: add --folds"), ({"fold": 5, "folds": 5}, "--fold 5 with --folds 5: must be 0 to 4")],
)
def test_a_fold_must_exist(options, message):
    from convolve.config.loading import build

    with pytest.raises(ConfigError, match=message):
        build(options)


def test_preparing_keeps_every_training_image(tmp_path):
    write_photos(tmp_path / "photos" / "train", {"a": 5, "b": 5})
    write_photos(tmp_path / "photos" / "test", {"a": 1, "b": 1}, first=100)
    report = prepare_images(tmp_path / "photos", tmp_path / "tars", PrepareOptions(), 1, ignore_progress)
    assert (report.train_samples, report.test_samples) == (10, 2)


def test_tiny_imagenet_is_read_in_its_layout(tmp_path):
    for label, name in enumerate(("n01", "n02")):
        write_photos(tmp_path / "train" / name, {"images": 3}, ".JPEG", first=10 * label)
        (tmp_path / "train" / name / f"{name}_boxes.txt").write_text("n01_0.JPEG\t0\t0\t9\t9\n")
    images = tmp_path / "val" / "images"
    images.mkdir(parents=True)
    for number in range(4):
        draw_photo(0, 100 + number).save(images / f"val_{number}.JPEG")
    lines = [f"val_{number}.JPEG\tn0{2 - number % 2}\t0\t0\t9\t9\n" for number in range(4)]
    (tmp_path / "val" / "val_annotations.txt").write_text("".join(lines))
    write_photos(tmp_path / "test", {"images": 2}, ".JPEG", first=200)
    dataset = opened(tmp_path)
    assert dataset.classes == ("n01", "n02") and dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    found = {Path(dataset.test.name(row)).name: label for row, label in enumerate(dataset.test.labels.tolist())}
    assert found == {f"val_{number}.JPEG": 1 - number % 2 for number in range(4)}
    assert any(reason == "test images without labels" for reason, _, _ in dataset.skipped)


def write_flat_imagenet(root):
    write_photos(root / "train", {"n01": 2, "n02": 2}, ".JPEG")
    (root / "val").mkdir()
    for number in range(1, 4):
        draw_photo(0, 100 + number).save(root / "val" / f"ILSVRC2012_val_0000000{number}.JPEG")
    return root


@pytest.mark.parametrize("kind", ["solution", "synsets", "devkit"])
def test_imagenet_validation_images_get_their_classes_from_a_file(tmp_path, kind):
    root = write_flat_imagenet(tmp_path / "imagenet")
    if kind == "solution":
        lines = [f"ILSVRC2012_val_0000000{n},n0{1 + n % 2} 1 2 3 4\n" for n in (3, 1, 2)]
        (root / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(lines))
    elif kind == "synsets":
        (root / "imagenet_2012_validation_synset_labels.txt").write_text("n02\nn01\nn02\n")
    else:
        kit = root / "ILSVRC2012_devkit_t12" / "data"
        kit.mkdir(parents=True)
        (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("7\n3\n7\n")
        (kit / "meta.mat").write_bytes(pack_meta({3: "n01", 7: "n02", 9: "n99"}))
    dataset = opened(root)
    found = {Path(dataset.test.name(row)).stem[-1]: label for row, label in enumerate(dataset.test.labels.tolist())}
    assert found == {"1": 1, "2": 0, "3": 1}


def test_a_damaged_meta_mat_is_an_error(tmp_path):
    root = write_flat_imagenet(tmp_path / "imagenet")
    kit = root / "ILSVRC2012_devkit_t12" / "data"
    kit.mkdir(parents=True)
    (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("7\n3\n7\n")
    (kit / "meta.mat").write_bytes(bytes(range(256)) * 3)
    with pytest.raises(DataError, match=r"meta\.mat: not the meta\.mat of ImageNet"):
        opened(root)


def test_a_split_without_labels_is_an_error(tmp_path):
    with pytest.raises(DataError, match="val: neither class folders nor a file with the classes"):
        opened(write_flat_imagenet(tmp_path / "imagenet"))


def write_table(root, text, name="labels.csv"):
    folder = root / "images"
    folder.mkdir(parents=True)
    for number in range(12):
        draw_photo(number % 2, number).save(folder / f"{number}.jpg")
    (root / name).write_text(text)
    return root


def test_a_table_names_labels_and_splits(tmp_path):
    rows = [f"images/{n}.jpg,{'cat' if n % 2 else 'dog'},{('train', 'val', 'test')[n // 4]}\n" for n in range(12)]
    dataset = opened(write_table(tmp_path, "file,label,split\n" + "".join(rows)))
    assert dataset.classes == ("cat", "dog") and dataset.test.labels.tolist() == [0, 0, 1, 1]
    assert {name: len(reader) for name, reader in dataset.splits.items()} == {"train": 4, "validation": 4, "test": 4}


@pytest.mark.parametrize("head", ["id,class\n", ""])
def test_a_table_without_splits_is_divided(tmp_path, head):
    rows = [f"images/{n},{'cat' if n % 2 else 'dog'}\n" for n in range(12)]
    root = write_table(tmp_path, head + "".join(rows), "animals.csv")
    dataset = opened(root / "animals.csv", fraction=0.3)
    assert len(dataset.train) + len(dataset.test) == 12 and set(dataset.test.labels.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,kind\nimages/0.jpg,cat\n", "no column 'label' in the heading"),
        ("file,label\nimages/0.jpg,\n", r"line 2: must be a file and its label"),
        ("images/0.jpg,cat,train\ntrain\n", r"line 2: must be a file and its label"),
        ("file,label\nimages/99.jpg,cat\n", r"line 2: images/99.jpg: no such file"),
        ("file,label\n../secret.jpg,cat\n", "line 2: ../secret.jpg: must be inside the folder of the table"),
        ("file,label,split\nimages/0.jpg,cat,tset\n", "line 2: split 'tset': must be train, val or test"),
        ("file,label,split\nimages/0.jpg,cat,test\n", "no line of the split train"),
        ("file,label\nimages/0.jpg,cat\nimages/0.jpg,dog\n", "lines 2 and 3: images/0.jpg is listed twice"),
        ("", "contains no image"),
    ],
)
def test_a_wrong_table_is_an_error_with_its_line(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        opened(write_table(tmp_path, text))
