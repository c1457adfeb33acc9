"""Every entry of a data set is a sample, an error, or counted as skipped."""

import json
import os
import shutil
import subprocess
import tarfile
from io import BytesIO

import pytest

from convolve.data.readers.detect import open_images
from convolve.data.readers.locations import SkippedEntries
from convolve.data.readers.tar_members import locate_samples
from convolve.download import ignore_progress
from convolve.errors import DataError
from convolve.loggers.base import SilentConsole
from convolve.runs import session
from photo_sets import photo_config, write_every_format


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_every_format(tmp_path_factory.mktemp("photos"))


def write_tar(path, members):
    """Write (name, data) as files, (name, link, kind) as links."""
    with tarfile.open(path, "w") as archive:
        for name, data, *kind in members:
            member = tarfile.TarInfo(name)
            if kind:
                member.type, member.linkname = kind[0], data
                archive.addfile(member)
            else:
                member.size = len(data)
                archive.addfile(member, BytesIO(data))
    return path


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 4, 5, 2, 3)], ids=["adjacent", "apart"])
def test_samples_with_the_same_key_in_one_tar_are_an_error_that_names_key_and_shard(order, tmp_path):
    members = [
        ("a/7.jpg", b"x"),
        ("a/7.cls", b"1"),
        ("a/7.jpg", b"y"),
        ("a/7.cls", b"0"),
        ("8.jpg", b"z"),
        ("8.cls", b"0"),
    ]
    path = write_tar(tmp_path / "train-3.tar", [members[number] for number in order])
    with pytest.raises(DataError, match=r"train-3\.tar: two samples have the key a/7"):
        locate_samples(path, 0)


def test_the_same_key_in_two_tars_is_two_samples(tmp_path):
    for number in (0, 1):
        write_tar(
            tmp_path / f"train-{number}.tar", [("7.jpg", b"x"), ("7.cls", b"1"), ("8.jpg", b"x"), ("8.cls", b"0")]
        )
    dataset = open_images(tmp_path, "x", ignore_progress)
    assert len(dataset.train) + len(dataset.test) == 4


def test_a_hard_link_has_the_data_of_the_member_it_names(tmp_path):
    path = write_tar(
        tmp_path / "x.tar",
        [("0.jpg", b"data"), ("0.cls", b"1"), ("1.jpg", "0.jpg", tarfile.LNKTYPE), ("1.cls", "0.cls", tarfile.LNKTYPE)],
    )
    first, second = locate_samples(path, 0)
    assert (first.offset, first.length, first.label) == (second.offset, second.length, second.label)
    assert second.name == "1"


def test_a_hard_link_to_nothing_is_an_error(tmp_path):
    path = write_tar(tmp_path / "x.tar", [("1.jpg", "../0.jpg", tarfile.LNKTYPE), ("1.cls", b"0")])
    with pytest.raises(DataError, match=r"1\.jpg links to \.\./0\.jpg"):
        locate_samples(path, 0)


def test_a_sparse_member_is_an_error_that_names_it(tmp_path):
    with (tmp_path / "0.jpg").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"x")
    (tmp_path / "0.cls").write_text("0")
    subprocess.run(["tar", "--sparse", "-cf", "x.tar", "0.cls", "0.jpg"], cwd=tmp_path, check=True)
    with pytest.raises(DataError, match=r"member 0\.jpg is sparse"):
        locate_samples(tmp_path / "x.tar", 0)


def test_every_member_of_a_tar_is_used_or_counted(tmp_path):
    members = [("0.jpg", b"x"), ("0.cls", b"0"), ("0.txt", b"caption"), ("0.png", b"y"), ("._0.jpg", b"z")]
    path = write_tar(tmp_path / "x.tar", [*members, ("1.jpg", "0.jpg", tarfile.SYMTYPE)])
    skipped = SkippedEntries()
    assert len(locate_samples(path, 0, skipped)) == 1
    assert skipped.listed() == (
        ("hidden file", 1, "x.tar: ._0.jpg"),
        ("symbolic link or device in a tar", 1, "x.tar: 1.jpg"),
        ("member of a sample that is not read", 2, "x.tar: 0.txt"),
    )


def test_tars_of_no_split_are_counted(photos, tmp_path):
    shutil.copytree(photos / "tar", tmp_path / "tar")
    write_tar(tmp_path / "tar" / "extra-0.tar", [("0.jpg", b"x"), ("0.cls", b"0")])
    assert open_images(tmp_path / "tar", "x", ignore_progress).skipped == (("tar of no split", 1, "extra-0.tar"),)


@pytest.fixture
def untidy(photos, tmp_path):
    """A folder of photographs with a subfolder, a note, a FIFO and a stray file."""
    root = tmp_path / "folder"
    shutil.copytree(photos / "folder", root)
    classes = root / "train" / "class-0"
    (classes / "more").mkdir()
    (classes / "more" / "a.jpg").write_bytes(b"")
    (classes / "more.jpg").mkdir()
    (classes / "note.txt").write_text("x")
    os.mkfifo(classes / "pipe.jpg")
    (root / "train" / "stray.jpg").write_bytes(b"")
    return root


def test_every_entry_of_a_folder_is_used_or_counted_also_from_the_cached_index(untidy):
    expected = (
        ("file outside the class folders", 1, "train/stray.jpg"),
        ("subfolder of a class folder", 2, "class-0/more"),
        ("file without the suffix of an image", 1, "class-0/note.txt"),
        ("not a regular file", 1, "class-0/pipe.jpg"),
    )
    for _ in range(2):
        dataset = open_images(untidy, "x", ignore_progress)
        assert dataset.skipped == expected
        seen = sum(1 for path in (untidy / "train").glob("*/*")) + 1
        assert seen == len(dataset.train) + sum(count for _, count, _ in expected)


def test_a_run_prints_a_line_for_each_reason_of_skipped_entries_and_stores_them(untidy, tmp_path):
    lines = []

    class Listening(SilentConsole):
        def info(self, line):
            lines.append(line)

    config = photo_config(untidy.parent, "folder", tmp_path / "run", iterations=1, epochs=None)
    session.train(config, Listening())
    found = [line for line in lines if "skipped" in line]
    assert "2 skipped, subfolder of a class folder: class-0/more" in found
    assert len(found) == 4 and max(map(len, found)) <= 80
    events = [json.loads(text) for text in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "skipped_entries"]
    assert {"reason": "not a regular file", "count": 1, "example": "class-0/pipe.jpg"} in event["entries"]


def test_a_name_that_is_not_utf_8_is_indexed(photos, tmp_path):
    root = tmp_path / "folder"
    shutil.copytree(photos / "folder", root)
    source = next((root / "train" / "class-0").glob("*.jpg"))
    source.rename(os.fsdecode(os.fsencode(source.parent) + b"/\xff\xfe.jpg"))
    for _ in range(2):
        dataset = open_images(root, "x", ignore_progress)
        for row in range(len(dataset.train)):
            dataset.train.read(row)
