"""Checks of a folder before training: what they find in a messy folder, and what they do not report."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from convolve.data import label_check
from convolve.data.inspect import (
    BROKEN,
    DUPLICATE,
    IMBALANCE,
    NEAR_DUPLICATE,
    NOT_AN_IMAGE,
    SMALL_CLASS,
    TINY,
    WRONG_LABEL,
    format_findings,
    inspect,
    write_findings,
)
from convolve.data.label_check import find_suspects
from convolve.data.readers.detect import open_images
from convolve.download import ignore_progress
from drawn_photos import draw_photo, write_photos
from messy_folder import FEW, build_messy_folder, color_features


def opened(root):
    found = open_images(root, str(root), ignore_progress)
    assert found is not None
    return found


@pytest.fixture
def messy(tmp_path):
    return build_messy_folder(tmp_path / "photos")


def test_a_messy_folder_is_seen_through(messy):
    dataset = opened(messy.root)
    features = {name: color_features(reader) for name, reader in dataset.splits.items()}
    found = inspect(dataset, features)

    def paths(kind):
        return {Path(finding.path) for finding in found.of(kind)}

    def pairs(kind):
        return {frozenset((Path(finding.path), Path(finding.other))) for finding in found.of(kind)}

    assert paths(BROKEN) == messy.broken
    assert paths(NOT_AN_IMAGE) == messy.strays
    assert pairs(DUPLICATE) == {frozenset(pair) for pair in messy.copies}
    near = {frozenset(pair) for pair in messy.near}
    assert len(near & pairs(NEAR_DUPLICATE)) >= 0.9 * len(near) and not pairs(NEAR_DUPLICATE) - near
    assert len(found.leaks) == 12 and {finding.split for finding in found.leaks} == {"validation"}
    assert len(paths(WRONG_LABEL) & messy.swapped) >= 14 and len(paths(WRONG_LABEL) - messy.swapped) <= 20
    assert paths(SMALL_CLASS) == {Path(FEW)} and found.of(SMALL_CLASS)[0].detail == "4 training images"
    assert found.of(IMBALANCE)
    assert found.modes["CMYK"] and found.modes["P"] and found.rotated
    assert found.images == sum(map(len, dataset.splits.values()))


def test_the_summary_fits_a_terminal_and_the_table_lists_everything(messy, tmp_path):
    found = inspect(opened(messy.root))
    lines = format_findings(found, messy.root)
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("3 images cannot be read: ") for line in lines)
    assert any(line.startswith("12 exact duplicates: val") for line in lines)
    assert lines[-1] == "12 copies are in another split, so the accuracy looks too good"
    write_findings(found, tmp_path / "checks.csv")
    with (tmp_path / "checks.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found.findings)
    assert {row["path"] for row in rows if row["kind"] == BROKEN} == {str(path) for path in messy.broken}


def test_a_clean_folder_has_no_findings(tmp_path):
    write_photos(tmp_path / "photos" / "train", {"a": 30, "b": 30, "c": 30})
    write_photos(tmp_path / "photos" / "val", {"a": 5, "b": 5, "c": 5}, first=900)
    dataset = opened(tmp_path / "photos")
    features = {name: color_features(reader) for name, reader in dataset.splits.items()}
    found = inspect(dataset, features)
    assert len(found.of(WRONG_LABEL)) <= 2
    assert [finding for finding in found.findings if finding.kind != WRONG_LABEL] == []
    assert found.sizes == ((90, 120),) * 3 and found.modes == {"RGB": 105} and found.rotated == 0
    assert format_findings(found)[0] == "checked 105 images in 3 classes, 30 to 30 each"


def test_copies_with_different_labels_say_so(tmp_path):
    write_photos(tmp_path / "train", {"a": 12, "b": 12})
    write_photos(tmp_path / "val", {"a": 2, "b": 2}, first=900)
    (tmp_path / "train" / "b" / "copy.jpg").write_bytes((tmp_path / "train" / "a" / "photo 003.jpg").read_bytes())
    finding = inspect(opened(tmp_path)).of(DUPLICATE)[0]
    assert finding.detail == "same bytes, but is labeled a" and finding.label == "b" and not finding.across


def test_tiny_images_are_reported(tmp_path):
    write_photos(tmp_path / "train", {"a": 12, "b": 12})
    write_photos(tmp_path / "val", {"a": 2, "b": 2}, first=900)
    draw_photo(0, 77).resize((12, 9)).save(tmp_path / "train" / "a" / "icon.png")
    found = inspect(opened(tmp_path))
    assert [finding.detail for finding in found.of(TINY)] == ["12 x 9 pixels"] and found.sizes[0] == (9, 12)


def test_labels_are_judged_without_the_image_itself():
    chance = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 50)
    features = (np.eye(4)[labels] * 4 + chance.normal(size=(200, 4))).astype(np.float32)
    wrong = chance.choice(200, 10, replace=False)
    given = labels.copy()
    given[wrong] = (given[wrong] + 1) % 4
    found = find_suspects(features, given, np.arange(200))
    assert len({one.row for one in found} & set(wrong.tolist())) >= 9 and len(found) <= 16
    assert all(one.suggestion == labels[one.row] for one in found if one.row in wrong)


def test_few_images_and_many_are_fitted_to_the_same_result():
    chance = np.random.default_rng(1)
    values, targets, held = (
        torch.from_numpy(chance.normal(size=size)).double() for size in ((30, 40), (30, 3), (5, 40))
    )
    primal, dual = (fit(values, targets, held) for fit in (label_check._fit_primal, label_check._fit_dual))
    torch.testing.assert_close(primal, dual)


def test_a_class_of_a_few_images_is_not_judged():
    features = np.concatenate((np.zeros((50, 3)), np.full((4, 3), 0.01))).astype(np.float32)
    assert find_suspects(features, np.repeat([0, 1], [50, 4]), np.arange(54)) == []


def test_images_without_features_are_ignored():
    features = np.full((20, 3), np.nan, np.float32)
    assert find_suspects(features, np.arange(20) % 2, np.arange(20)) == []
