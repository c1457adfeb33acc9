from pathlib import Path

import numpy as np
import pytest

from convolve.data.catalog import MNIST
from convolve.data.check import check_data, fetch_dataset, list_datasets
from convolve.data.lookup import load_digits
from convolve.data.readers.mnist import pack_idx
from convolve.download import ignore_progress
from convolve.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DATA_DIR", "DATASETS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never(line: str) -> None:
    raise AssertionError(f"announced: {line}")


def write_digits_as(folder: Path, change: int = 0) -> Path:
    """The shipped digits under the file names of MNIST, with one label changed to make them unknown."""
    digits = load_digits()
    labels = digits.test.labels.copy()
    labels[0] = (labels[0] + change) % 10
    arrays = (digits.train.images[..., 0], digits.train.labels, digits.test.images[..., 0], labels)
    folder.mkdir()
    for file, values in zip(MNIST.files, arrays, strict=True):
        (folder / file.name).write_bytes(pack_idx(values))
    return folder


def test_the_list_shows_available_and_missing_datasets(own_cache: Path) -> None:
    listing = {entry.name: entry for entry in list_datasets()}
    assert list(listing) == ["mnist", "fashion-mnist", "digits", "cifar-10", "cifar-100"]
    assert listing["digits"].place == "shipped with convolve"
    assert listing["mnist"].place is None
    assert listing["mnist"].stored_bytes == 54_950_048
    assert "CC BY 4.0" in listing["digits"].licence


def test_the_list_finds_the_cache_by_sizes(own_cache: Path) -> None:
    folder = own_cache / "datasets" / "mnist"
    folder.mkdir(parents=True)
    for file in MNIST.files:
        with (folder / file.name).open("wb") as sink:
            sink.truncate(file.size)
    assert list_datasets()[0].place == f"cache: {folder}"


def test_the_bundled_dataset_needs_no_download() -> None:
    supply = fetch_dataset("digits", progress=ignore_progress)
    assert (supply.place, supply.fetched) == ("shipped with convolve", False)


def test_an_unknown_dataset_cannot_be_fetched() -> None:
    with pytest.raises(ConfigError, match="did you mean digits"):
        fetch_dataset("digit", progress=ignore_progress)


def test_a_check_counts_each_class_and_verifies_the_contents() -> None:
    report = check_data("digits", announce=never, progress=ignore_progress)
    assert report.contents == "published"
    assert (report.train_samples, report.test_samples, report.image_shape) == (1500, 297, (28, 28, 1))
    assert list(report.train_counts) == list("0123456789")
    assert report.test_counts["0"] == int(np.sum(load_digits().test.labels == 0))


def test_a_check_of_a_folder_reports_other_contents_as_different(tmp_path: Path) -> None:
    report = check_data(str(write_digits_as(tmp_path / "own", 1)), announce=never, progress=ignore_progress)
    assert report.contents == "different"
    assert report.train_samples == 1500


def test_a_check_of_a_folder_with_a_set_under_false_names_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains digits, not mnist"):
        check_data(str(write_digits_as(tmp_path / "own")), announce=never, progress=ignore_progress)


def test_a_check_of_an_empty_folder_lists_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no known data set; looked for mnist"):
        check_data(str(tmp_path), announce=never, progress=ignore_progress)


def test_a_check_of_nothing_suggests_names() -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a known data set; did you mean mnist"):
        check_data("minst", announce=never, progress=ignore_progress)


def test_a_check_never_downloads() -> None:
    with pytest.raises(DataError, match="download is off"):
        check_data("mnist", announce=never, progress=ignore_progress)
