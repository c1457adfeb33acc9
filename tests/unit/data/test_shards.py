"""Archives are indexed in a sandbox: their parsers can do no harm, and limits end what takes too long or too much."""

import io
import json
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import sandbox_attacks
from convolve.data.readers import records, shards, tar_members
from convolve.data.readers.index import index_shards
from convolve.data.readers.locations import SkippedEntries
from convolve.data.readers.shards import ShardIndexer, limits_for
from convolve.errors import DataError, SandboxError
from convolve.sandbox import Limits
from record_files import imagenet_example, write_records

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux's")
TESTS = Path(__file__).parents[2]


def png(value):
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(buffer, "png")
    return buffer.getvalue()


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def samples(count):
    return [entry for n in range(count) for entry in ((f"{n}.png", png(n)), (f"{n}.cls", str(n % 3).encode()))]


@pytest.fixture
def tar(tmp_path):
    boxes = json.dumps({"bbox": [[0, 0.25, 1, 0.5]]}).encode()
    return write_tar(tmp_path / "train-0.tar", [*samples(5), ("4.json", boxes), ("4.txt", b"unused"), (".x", b"")])


def test_the_sandbox_finds_what_the_parser_finds_in_a_tar(tar):
    skipped = SkippedEntries()
    expected = tar_members.locate_samples(tar, 3, skipped)
    with ShardIndexer("tar", [tar]) as indexer:
        found, unused = indexer.locate(tar, 3)
        assert indexer.sandbox.confinement is not None
    assert found == expected and len(found) == 5 and found[4].boxes == ((0.0, 0.25, 1.0, 0.5),)
    assert unused.listed() == skipped.listed() != ()


def test_the_sandbox_finds_what_the_parser_finds_in_records(tmp_path):
    path = tmp_path / "train-00000-of-00001"
    write_records(path, [imagenet_example(png(n), n + 1) for n in range(4)])
    with ShardIndexer("tfrecord", [path]) as indexer:
        assert indexer.locate(path, 0)[0] == records.locate_samples(path, 0)


def test_an_index_is_built_without_parsing_in_this_process(tar, tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    for module in (tar_members, records):
        monkeypatch.setattr(module, "locate_samples", None)
    monkeypatch.setattr(tarfile, "open", None)
    index = index_shards(tmp_path, [tar], "tar train", "tar", lambda what, done, total: None)
    assert len(index) == 5 and index.labels.tolist() == [0, 1, 2, 0, 1] and index.read(2) == png(2)


def test_an_error_names_the_path_as_given(tmp_path, monkeypatch):
    (tmp_path / "x.tar").write_bytes(b"no tar" * 200)
    monkeypatch.chdir(tmp_path)
    with (
        ShardIndexer("tar", [Path("x.tar")]) as indexer,
        pytest.raises(DataError, match=r"^x\.tar: not a readable tar"),
    ):
        indexer.locate(Path("x.tar"), 0)


@pytest.mark.parametrize("name", ["tar of Füße.tar", os.fsdecode(b"caf\xe9.tar")])
def test_any_file_name_can_be_indexed(tmp_path, name):
    path = write_tar(tmp_path / name, samples(2))
    with ShardIndexer("tar", [path]) as indexer:
        assert len(indexer.locate(path, 0)[0]) == 2


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("write_file", lambda folder: folder / "mark"),
        ("append_file", lambda folder: folder / "train-0.tar"),
        ("remove_file", lambda folder: folder / "train-0.tar"),
        ("read_file", lambda folder: folder / "other.tar"),
        ("connect", lambda folder: "127.0.0.1:9"),
        ("run_program", lambda folder: folder / "mark"),
        ("fork", lambda folder: ""),
    ],
)
def test_a_compromised_parser_can_do_no_harm(tar, name, payload, monkeypatch):
    """In the child of the indexer, with its rights, run what a hole in a parser would allow."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    folder = tar.parent
    write_tar(folder / "other.tar", samples(1))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with ShardIndexer("tar", [tar]) as indexer:
        assert callable(getattr(sandbox_attacks, name))
        indexer.sandbox.function = f"sandbox_attacks:{name}"
        indexer.sandbox.start()
        if not (indexer.sandbox.confinement.landlock and indexer.sandbox.confinement.seccomp):
            pytest.skip(f"this kernel gives {indexer.sandbox.confinement}")
        with pytest.raises(SandboxError):
            indexer.sandbox.call(str(payload(folder)).encode())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("limits", "problem"),
    [(Limits(seconds=0.0), "time limit"), (Limits(result_bytes=10), "over the limit"), (Limits(memory_bytes=0), "")],
)
def test_limits_end_an_archive_that_takes_too_much(tar, monkeypatch, limits, problem):
    monkeypatch.setattr(shards, "limits_for", lambda size: limits)
    if not limits.memory_bytes:
        big = json.dumps({"label": 1, "x": "y" * 900_000}).encode()
        write_tar(tar, [entry for n in range(3) for entry in ((f"{n}.png", png(n)), (f"{n}.json", big))])
    with ShardIndexer("tar", [tar]) as indexer, pytest.raises(DataError, match=f"cannot .*{problem}"):
        indexer.locate(tar, 0)


def test_limits_grow_with_the_size_of_a_shard():
    small, large = limits_for(1000), limits_for(1 << 40)
    assert small.seconds < large.seconds and small.result_bytes < large.result_bytes
    assert small.memory_bytes < large.memory_bytes


@pytest.mark.parametrize(
    "result",
    [b"[]", b"{}", b"\xff", b'{"samples": [[1]], "skipped": {}}', b'{"samples": [[-1, 1, 0, "x", []]], "skipped": {}}'],
)
def test_garbage_from_a_compromised_child_is_rejected(result):
    with pytest.raises(SandboxError, match="garbage"):
        shards._unpack(result, 0)
