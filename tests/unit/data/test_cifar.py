import hashlib
import io
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cifar_files import COUNT, records, write_binary, write_python
from convolve.config.schema import DataConfig
from convolve.data.catalog import CIFAR10, CIFAR100, Archive, DatasetInfo, IdxFile
from convolve.data.fetch import fetch_entry
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.lookup import infer_entry, open_dataset
from convolve.data.readers.cifar import read_binary
from convolve.download import ignore_progress
from convolve.errors import DataError
from data_samples import Server


@pytest.mark.parametrize("entry", [CIFAR10, CIFAR100], ids=lambda entry: entry.name)
@pytest.mark.parametrize(("write", "version"), [(write_binary, "binary"), (write_python, "python")])
def test_both_versions_hold_the_same_images(tmp_path: Path, entry: DatasetInfo, write, version: str) -> None:
    write(tmp_path, entry)
    dataset = open_dataset(DataConfig(dataset=entry.name, data_dir=tmp_path), announce=print, progress=ignore_progress)
    assert isinstance(dataset.train, InMemoryImages) and isinstance(dataset.test, InMemoryImages)
    planes, fine, _ = records(entry, len(entry.files) - 1)
    assert np.array_equal(dataset.test.labels, fine)
    assert np.array_equal(dataset.test.images, planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    assert len(dataset.train) == COUNT * (len(entry.files) - 1)


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_the_set_is_inferred_from_the_folder_and_its_files(tmp_path: Path, place: str) -> None:
    write_binary(tmp_path / place, CIFAR10)
    dataset = open_dataset(DataConfig(data_dir=tmp_path), announce=print, progress=ignore_progress)
    assert dataset.name == "cifar-10"


def test_a_folder_named_after_fashion_is_not_taken_for_mnist(tmp_path: Path, sample) -> None:
    for name in ("fashion", "mnist"):
        sample.write_idx(tmp_path / name)
    assert [infer_entry(tmp_path / name).name for name in ("fashion", "mnist")] == ["fashion-mnist", "mnist"]


def pack_archive(folder: Path, entry: DatasetInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in entry.files:
            archive.add(folder / file.name, f"cifar-10-batches-bin/{file.name}")
    return buffer.getvalue()


def test_the_published_archive_is_fetched_checked_and_unpacked(tmp_path: Path, server: Server) -> None:
    folder = write_binary(tmp_path / "made", CIFAR10)
    archive = pack_archive(folder, CIFAR10)
    files = tuple(
        IdxFile(file.name, len(data), hashlib.sha256(data).hexdigest())
        for file in CIFAR10.files
        for data in [(folder / file.name).read_bytes()]
    )
    package = Archive("cifar.tar.gz", len(archive), hashlib.sha256(archive).hexdigest())
    entry = replace(CIFAR10, files=files, archive=package, mirrors=(server.url,))
    server.files["cifar.tar.gz"] = archive
    fetch_entry(entry, tmp_path / "cache", ignore_progress)
    assert read_binary(tmp_path / "cache", entry) is not None
    assert sorted(path.name for path in (tmp_path / "cache").iterdir())[1:] == sorted(file.name for file in files)
    server.files["cifar.tar.gz"] = archive[:-1] + b"x"
    with pytest.raises(DataError, match=r"cifar\.tar\.gz has other contents than the published file"):
        fetch_entry(entry, tmp_path / "other", ignore_progress)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    (write_binary(tmp_path, CIFAR10) / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin missing; add all files of cifar-10"):
        read_binary(tmp_path, CIFAR10)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = write_binary(tmp_path, CIFAR10) / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"test_batch\.bin: .* must be records of 3073 bytes"):
        read_binary(tmp_path, CIFAR10)


def test_a_pickle_that_wants_to_run_code_is_rejected_and_nothing_runs(tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "canary",))

    write_python(tmp_path, CIFAR10)
    for protocol in (0, 2, 4):
        (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": Canary()}, protocol))
        with pytest.raises(DataError, match="pickles are never run: use the binary version"):
            open_dataset(DataConfig(dataset="cifar-10", data_dir=tmp_path), announce=print, progress=ignore_progress)
    assert not (tmp_path / "canary").exists()


def test_mutated_pickles_end_in_named_errors_or_data(tmp_path: Path) -> None:
    from convolve.data.readers.cifar import read_fields

    good = bytearray((write_python(tmp_path, CIFAR10) / "test_batch").read_bytes())
    chance, path = np.random.default_rng(0), tmp_path / "mutant"
    for _ in range(400):
        mutant = bytearray(good)
        for place in chance.integers(0, 200, 3):
            mutant[place] = chance.integers(0, 256)
        path.write_bytes(mutant[: chance.integers(1, len(good))] if chance.random() < 0.3 else mutant)
        try:
            read_fields(path, limit=1 << 20)
        except DataError as error:
            assert "mutant" in str(error)
