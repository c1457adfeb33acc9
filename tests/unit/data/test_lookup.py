import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convolve.config.schema import DataConfig
from convolve.data.catalog import CATALOG, MNIST, find_dataset
from convolve.data.dataset import Dataset
from convolve.data.lookup import cache_folder, open_dataset
from convolve.data.readers.mnist import pack_idx
from convolve.download import ignore_progress
from convolve.errors import ConfigError, DataError
from data_samples import Sample, example, frame


def open_quietly(**options: object) -> Dataset:
    """Opens a data set that must come without any remark."""
    lines: list[str] = []
    dataset = open_dataset(DataConfig(**options), announce=lines.append, progress=ignore_progress)
    assert lines == []
    return dataset


def assert_holds(dataset: Dataset, sample: Sample) -> None:
    x_train, y_train, x_test, y_test = sample.arrays
    assert np.array_equal(dataset.train.images[..., 0], x_train)
    assert np.array_equal(dataset.train.labels, y_train)
    assert np.array_equal(dataset.test.images[..., 0], x_test)
    assert np.array_equal(dataset.test.labels, y_test)


def write_npz(sample: Sample, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    x_train, y_train, x_test, y_test = sample.arrays
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


def write_records(images: np.ndarray, labels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as sink:
        for pixels, label in zip(images, labels.tolist(), strict=True):
            png = io.BytesIO()
            Image.fromarray(pixels).save(png, "PNG")
            sink.write(frame(example(png.getvalue(), label)))


def write_tfds(sample: Sample, folder: Path, *, shards: int = 1) -> Path:
    x_train, y_train, x_test, y_test = sample.arrays
    for shard in range(shards):
        part = slice(shard * 40 // shards, (shard + 1) * 40 // shards)
        write_records(x_train[part], y_train[part], folder / f"mnist-train.tfrecord-{shard:05}-of-{shards:05}")
    write_records(x_test, y_test, folder / "mnist-test.tfrecord-00000-of-00001")
    return folder


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw"])
def test_idx_files_are_found_in_the_folder_or_a_subfolder(
    tmp_path: Path, sample: Sample, ending: str, place: str
) -> None:
    sample.write_idx(tmp_path / place, ending=ending)
    dataset = open_quietly(dataset="mnist", data_dir=tmp_path)
    assert_holds(dataset, sample)
    assert dataset.origin == f"--data-dir {tmp_path}"


def test_the_names_that_unpacking_programs_give_are_found(tmp_path: Path, sample: Sample) -> None:
    for path in list(sample.write_idx(tmp_path).iterdir()):
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    assert_holds(open_quietly(dataset="mnist", data_dir=tmp_path), sample)


@pytest.mark.parametrize("place", ["mnist.npz", "mnist/mnist.npz"])
def test_an_npz_file_is_found_in_the_folder_or_a_subfolder(tmp_path: Path, sample: Sample, place: str) -> None:
    write_npz(sample, tmp_path / place)
    assert_holds(open_quietly(dataset="mnist", data_dir=tmp_path), sample)


def test_an_npz_file_can_be_passed_instead_of_its_folder(tmp_path: Path, sample: Sample) -> None:
    assert_holds(open_quietly(dataset="mnist", data_dir=write_npz(sample, tmp_path / "any.npz")), sample)


@pytest.mark.parametrize(("place", "shards"), [("", 1), ("3.0.1", 1), ("mnist/3.0.1", 3)])
def test_tfds_records_are_found(tmp_path: Path, sample: Sample, place: str, shards: int) -> None:
    write_tfds(sample, tmp_path / place, shards=shards)
    assert_holds(open_quietly(dataset="mnist", data_dir=tmp_path), sample)


def test_a_missing_shard_is_an_error(tmp_path: Path, sample: Sample) -> None:
    write_tfds(sample, tmp_path, shards=3)
    (tmp_path / "mnist-train.tfrecord-00001-of-00003").unlink()
    with pytest.raises(DataError, match="2 files mnist-train.tfrecord-.*3 belong together"):
        open_quietly(dataset="mnist", data_dir=tmp_path)


def test_the_environment_names_a_folder(tmp_path: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    sample.write_idx(tmp_path / "b" / "mnist")
    (tmp_path / "a").mkdir()
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("DATASETS_DIR", str(tmp_path / "b"))
    assert open_quietly(dataset="mnist").origin == f"$DATASETS_DIR {tmp_path / 'b'}"


def test_the_option_comes_before_the_environment(
    tmp_path: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_DIR", str(sample.write_idx(tmp_path / "environment")))
    given = sample.write_idx(tmp_path / "option")
    assert open_quietly(data_dir=given).origin == f"--data-dir {given}"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CONVOLVE_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c/datasets/mnist"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/convolve/datasets/mnist"),
        ({"HOME": "/h"}, "/h/.cache/convolve/datasets/mnist"),
    ],
)
def test_the_environment_sets_the_cache_folder(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CONVOLVE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder(MNIST) == Path(expected)


def test_a_named_set_that_is_not_in_the_given_folder_is_an_error_that_lists_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no mnist in it; looked for train-images.*mnist\.npz.*tfrecord.*mnist/"):
        open_quietly(dataset="mnist", data_dir=tmp_path)


def test_a_given_folder_without_data_is_an_error_even_if_no_set_was_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no labeled images in it; looked for a folder for each class"):
        open_quietly(data_dir=tmp_path)


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        open_quietly(dataset="mnist", data_dir=tmp_path / "absent")


def test_a_file_that_is_no_data_set_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    with pytest.raises(DataError, match="neither a folder nor an npz file"):
        open_quietly(dataset="mnist", data_dir=tmp_path / "file")


def test_a_folder_with_some_of_the_files_names_the_missing_ones(tmp_path: Path, sample: Sample) -> None:
    (sample.write_idx(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte missing; add all four files"):
        open_quietly(dataset="mnist", data_dir=tmp_path)


def test_another_known_dataset_under_the_same_file_names_is_rejected(tmp_path: Path, sample: Sample) -> None:
    digits = open_quietly(dataset="digits")
    sample.write_idx(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(pack_idx(digits.test.images[..., 0]))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(pack_idx(digits.test.labels))
    with pytest.raises(DataError, match="contains digits, not mnist; set --dataset digits"):
        open_quietly(dataset="mnist", data_dir=tmp_path)


def test_an_unknown_name_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown data set minst; did you mean mnist"):
        open_quietly(dataset="minst")


@pytest.mark.parametrize("download", [True, False])
def test_without_a_named_dataset_the_digits_are_used_with_one_message(download: bool) -> None:
    lines: list[str] = []
    dataset = open_dataset(DataConfig(download=download), announce=lines.append, progress=ignore_progress)
    assert dataset.name == "digits"
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert lines[0].startswith("training on the built-in digits, since mnist")


@pytest.mark.parametrize("download", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_a_named_dataset_is_never_replaced(name: str, download: bool) -> None:
    with pytest.raises(DataError, match=f"^{name} .*convolve data get {name}.*--data-dir FOLDER"):
        open_quietly(dataset=name, download=download)


def test_a_damaged_cache_is_announced_and_not_used(sample: Sample) -> None:
    sample.write_idx(cache_folder(MNIST))
    lines: list[str] = []
    with pytest.raises(DataError, match="download is off"):
        open_dataset(DataConfig(dataset="mnist", download=False), announce=lines.append, progress=ignore_progress)
    assert len(lines) == 1
    assert "ignoring damaged" in lines[0]


@pytest.mark.parametrize("kind", ["generated_data", "synthetic_data"])
def test_random_data_need_no_files(kind: str) -> None:
    dataset = open_quietly(dataset="digits", **{kind: True})
    assert len(dataset.train) == 1500
    assert "random images" in dataset.origin


def test_every_catalog_entry_is_consistent() -> None:
    for name, entry in CATALOG.items():
        assert find_dataset(name) is entry
        height, width, channels = entry.image_shape
        if entry.layout == "idx":
            assert entry.files[0].size == 16 + entry.train_count * height * width * channels
            assert entry.files[3].size == 8 + entry.test_count
        else:
            assert entry.stored_bytes % (entry.train_count + entry.test_count) == 0
            assert entry.archive is not None and len(entry.archive.sha256) == 64
        assert all(len(file.sha256) == 64 for file in entry.files)
        assert all(mirror.endswith("/") for mirror in entry.mirrors)
