"""Scans of images, and near duplicates among them."""

import io
import os

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from convolve.data import scan as scanning
from convolve.data.duplicates import Duplicate, find_duplicates, group_duplicates
from convolve.data.readers.detect import open_images
from convolve.data.readers.splits import SplitOptions
from convolve.data.scan import Scan, join_scans, scan_images
from convolve.download import ignore_progress
from drawn_photos import draw_photo, write_photos

CHANGES = {
    "smaller": lambda image: image.resize((60, 45)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.2),
    "more contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.3),
    "gray": lambda image: image.convert("L"),
    "cropped": lambda image: image.crop((4, 3, 116, 87)),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def opened(root):
    return open_images(root, str(root), ignore_progress, SplitOptions(rule="name")).train


@pytest.fixture
def plain(tmp_path):
    root = tmp_path / "plain"
    write_photos(root / "train", {"a": 30, "b": 30})
    write_photos(root / "val", {"a": 1, "b": 1}, first=900)
    return scan_images(opened(root), ignore_progress)


def test_different_images_are_no_duplicates(plain):
    assert find_duplicates(plain) == []


@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_are_near_duplicates(tmp_path, plain, change):
    root = tmp_path / "photos"
    for label, name in enumerate("ab"):
        (root / "train" / name).mkdir(parents=True)
        for number in range(10):
            CHANGES[change](draw_photo(label, number)).save(root / "train" / name / f"{number}.jpg", quality=80)
    write_photos(root / "val", {"a": 1, "b": 1}, first=900)
    both = join_scans([plain, scan_images(opened(root), ignore_progress)])
    found = {(pair.first, pair.second) for pair in find_duplicates(both)}
    wanted = {(30 * label + number, 60 + 10 * label + number) for label in range(2) for number in range(10)}
    assert len(found & wanted) >= 18 and not found - wanted


def test_the_same_bytes_are_an_exact_duplicate(plain):
    pairs = find_duplicates(join_scans([plain, plain.take(np.array([3, 5]))]))
    assert pairs == [Duplicate(3, 60, exact=True), Duplicate(5, 61, exact=True)]


def test_groups_join_chains_of_duplicates():
    pairs = [Duplicate(0, 2, exact=False), Duplicate(2, 4, exact=False), Duplicate(1, 3, exact=True)]
    assert group_duplicates(6, pairs).tolist() == [0, 1, 0, 1, 0, 5]


def test_a_set_of_images_that_all_look_alike_is_not_one_group():
    chain = [Duplicate(row, row + 1, exact=False) for row in range(99)]
    groups = group_duplicates(100, [*chain, Duplicate(7, 9, exact=True)])
    assert groups[9] == 7 and len(set(groups.tolist())) == 99


def test_a_scan_reports_sizes_modes_rotation_and_broken_files(tmp_path):
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    image = draw_photo(0, 1)
    note = Image.Exif()
    note[0x0112] = 6
    image.save(folder / "1 turned.jpg", exif=note)
    image.convert("CMYK").save(folder / "2 cmyk.jpg")
    image.convert("L").save(folder / "3 gray.png")
    image.convert("RGBA").save(folder / "4 clear.png")
    (folder / "5 empty.jpg").touch()
    (folder / "6 text.jpg").write_text("not an image")
    whole = io.BytesIO()
    image.save(whole, "JPEG")
    (folder / "7 half.jpg").write_bytes(whole.getvalue()[:900])
    write_photos(tmp_path / "train", {"b": 1})
    write_photos(tmp_path / "val", {"a": 1, "b": 1}, first=900)
    scan = scan_images(opened(tmp_path), ignore_progress)
    assert scan.modes[:4] == ("RGB", "CMYK", "L", "RGBA") and scan.sizes[:4].tolist() == [[90, 120]] * 4
    assert scan.orientations[:4].tolist() == [6, 1, 1, 1]
    assert scan.readable.tolist() == [True] * 4 + [False] * 3 + [True]
    assert scan.problems[4] == "empty file" and "not an image" in scan.problems[5]
    upright = scan.thumbnails[0].astype(int)
    assert np.abs(upright - np.rot90(scan.thumbnails[2].astype(int), 3)).mean() < 8, "thumbnails are upright"


def test_a_scan_is_cached_until_a_file_changes(tmp_path, monkeypatch):
    write_photos(tmp_path / "train", {"a": 3, "b": 3})
    write_photos(tmp_path / "val", {"a": 1, "b": 1}, first=900)
    read = []
    real = scanning._scan_chunk
    monkeypatch.setattr(scanning, "_scan_chunk", lambda *given: read.append(1) or real(*given))
    first = scan_images(opened(tmp_path), ignore_progress)
    again = scan_images(opened(tmp_path), ignore_progress)
    assert len(read) == 1 and (first.thumbnails == again.thumbnails).all() and first.modes == again.modes
    os.utime(tmp_path / "train" / "a" / "photo 001.jpg", (1, 1))
    scan_images(opened(tmp_path), ignore_progress)
    assert len(read) == 2


def test_a_damaged_cache_is_made_anew(tmp_path):
    write_photos(tmp_path / "train", {"a": 3, "b": 3})
    write_photos(tmp_path / "val", {"a": 1, "b": 1}, first=900)
    before = scan_images(opened(tmp_path), ignore_progress)
    for path in (tmp_path / "cache" / "scans").iterdir():
        path.write_bytes(path.read_bytes()[:-30])
    assert scan_images(opened(tmp_path), ignore_progress).key(0) == before.key(0)


def many_photos(count=1500, seed=3):
    """Return a scan of noise, in which every tenth image is the next one a little brighter."""
    chance = np.random.default_rng(seed)
    thumbnails = chance.integers(0, 200, (count, 32, 32), np.uint8)
    thumbnails[10::10] = thumbnails[9:-1:10] + 20
    digests = chance.integers(0, 256, (count, 16), np.uint8)
    sizes = np.full((count, 2), 100, np.int32)
    return Scan(digests, sizes, np.ones(count, np.uint8), thumbnails, ("RGB",) * count, ("",) * count)


def compared(scan):
    """Return the duplicates in a scan, and how often the search reported progress."""
    reports = []
    return find_duplicates(scan, lambda *progress: reports.append(progress)), len(reports)


def test_many_images_are_compared_once(tmp_path):
    first, reports = compared(many_photos())
    assert reports > 0 and {(pair.first, pair.second) for pair in first} == {(n - 1, n) for n in range(10, 1500, 10)}
    assert compared(many_photos()) == (first, 0)
    assert compared(many_photos(seed=4))[1] > 0, "other images"


def test_damaged_results_of_a_comparison_are_ignored(tmp_path):
    first, _ = compared(many_photos())
    (path,) = (tmp_path / "cache" / "scans").glob("duplicates-*.npz")
    for damage in (lambda data: data[:-30], lambda data: b"", lambda data: data[:150] + b"xyz" + data[153:]):
        path.write_bytes(damage(path.read_bytes()))
        found, reports = compared(many_photos())
        assert found == first and reports > 0
