"""Findings of a data check, read back for the report."""

from pathlib import Path

import pytest
from PIL import Image

from convolve.runs.findings import read_checks

HEAD = "kind,path,detail,split,label,other,across,suggestion,probability\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("train/cat/a.jpg", "test/cat/b.jpg", "../private.jpg"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (400, 200), "red").save(path)
    return tmp_path / "data"


def write(folder: Path, *rows: str) -> Path:
    (folder / "data-checks.csv").write_text(HEAD + "".join(f"{row}\n" for row in rows))
    return folder


def test_wrong_labels_come_back_likeliest_first_with_thumbnails(tmp_path: Path, data: Path) -> None:
    run = write(
        tmp_path,
        f"wrong label,{data}/train/cat/gone.jpg,looks like dog,train,cat,,,dog,0.700",
        f"wrong label,{data}/train/cat/a.jpg,looks like dog,train,cat,,,dog,0.900",
        f"duplicate,{data}/test/cat/b.jpg,same,test,cat,{data}/train/cat/a.jpg,yes,,",
    )
    checks = read_checks(run, str(data))
    assert checks is not None and checks.counts == {"duplicate": 1, "wrong label": 2}
    first, second = checks.wrong_labels
    assert first.pixels is not None and first.pixels.shape == (96, 192, 3) and first.probability == 0.9
    assert second.pixels is None
    [(copy, original)] = checks.leaks
    assert (copy.split, original.split, original.label) == ("test", "train", "cat")
    assert copy.pixels is not None and original.pixels is not None


def test_images_outside_of_the_data_folder_are_never_opened(tmp_path: Path, data: Path) -> None:
    (data / "train" / "link.jpg").symlink_to(data.parent / "private.jpg")
    paths = (f"{data.parent}/private.jpg", f"{data}/../private.jpg", f"{data}/train/link.jpg")
    run = write(tmp_path, *(f"wrong label,{path},x,train,cat,,,dog,0.9" for path in paths))
    checks = read_checks(run, str(data))
    assert checks is not None and [image.pixels for image in checks.wrong_labels] == [None] * 3


def test_a_run_without_a_check_has_no_findings(tmp_path: Path) -> None:
    assert read_checks(tmp_path, None) is None


def test_a_damaged_table_is_survived(tmp_path: Path) -> None:
    (tmp_path / "data-checks.csv").write_bytes(b"kind,path\nwrong label\n\xff\0,,,,\n")
    checks = read_checks(tmp_path, "nowhere")
    assert checks is None or len(checks.wrong_labels) == 1
