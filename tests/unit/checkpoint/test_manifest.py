"""Manifests: any change of a file or of the manifest is found and named, and nothing outside is ever read."""

import hashlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convolve.checkpoint.manifest import (
    FORMAT,
    VERSION,
    compare_written,
    encode_manifest,
    read_files,
    read_manifest,
    verify,
)
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import Store, choose_checkpoint, find_best, find_checkpoints, load
from convolve.errors import CheckpointError

STATE = b'{"step": 3}'


def sealed(content):
    """The bytes of a manifest with this content, sealed like a real one."""

    def canonical(value):
        return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()

    return canonical({**content, "sha256": hashlib.sha256(canonical(content)).hexdigest()})


def entry(data=STATE):
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def content(**changes):
    return {"format": FORMAT, "version": VERSION, "files": {"state.json": entry()}, **changes}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "step-000000003"
    path.mkdir()
    (path / "state.json").write_bytes(STATE)
    (path / "manifest.json").write_bytes(encode_manifest({"state.json": STATE}))
    return path


def test_an_intact_checkpoint_is_read_as_written(folder):
    verify(folder)
    assert dict(read_files(folder)) == {"state.json": STATE}
    assert (folder / "manifest.json").read_bytes() == sealed(content())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not a manifest"),
        (b"\xff\xfe", "not a manifest"),
        (b"[]", "not a manifest"),
        (b"{}", "not a manifest"),
        (b"[" * 60_000, "not a manifest"),
        (b"x" * (2**20 + 1), "1048577 bytes are too many for a manifest"),
        (sealed(content())[:-1], "the sha256 in it differs"),
        (sealed(content()).replace(b'"bytes": 11', b'"bytes": 12'), "the sha256 in it differs"),
        (json.dumps(json.loads(sealed(content()))).encode(), "the sha256 in it differs"),
        (sealed(content(files=[])), "no list of files"),
        (sealed(content(files={"state.json": {}})), "no list of files"),
        (sealed(content(files={"state.json": {"bytes": "many", "sha256": "x"}})), "no list of files"),
        (sealed(content(files={})), "does not name state.json"),
        (sealed(content(files={"state.json": entry(), "../../secret": entry()})),
         "names '../../secret', which is no part of a checkpoint"),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_named_with_its_problem(folder, data, problem):
    (folder / "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    assert str(caught.value) == (
        f"{folder / 'manifest.json'}: damaged checkpoint ({problem}); use another checkpoint, or "
        "`convolve restore RUN`, which uses the newest intact one"
    )


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"version": 3}, "format convolve-checkpoint version 3"),
        ({"format": "other"}, "format other version 1"),
        ({"version": None}, "format convolve-checkpoint version None"),
    ],
)
def test_a_manifest_of_another_version_is_not_called_damaged(folder, changes, found):
    (folder / "manifest.json").write_bytes(sealed(content(**changes)))
    with pytest.raises(CheckpointError, match=f"{found}: this convolve reads convolve-checkpoint versions 1 and 2"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "0 bytes instead of 11"),
        (STATE + b" ", "12 bytes instead of 11"),
        (b'{"step": 4}', "sha256 differs from manifest.json"),
    ],
)
@pytest.mark.parametrize("read", [verify, lambda path: list(read_files(path)), load], ids=["verify", "read", "load"])
def test_a_damaged_file_is_named_with_its_problem(folder, data, problem, read):
    (folder / "state.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"state.json: damaged checkpoint \({problem}\); use another checkpoint"):
        read(folder)


def test_a_folder_or_a_missing_file_in_place_of_a_file_is_damage(folder):
    (folder / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state.json: damaged checkpoint \(missing\)"):
        verify(folder)
    (folder / "state.json").mkdir()
    with pytest.raises(CheckpointError, match=r"state.json: damaged checkpoint \(missing\)"):
        verify(folder)


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_manifest_is_found(tmp_path_factory, position, bit):
    folder = tmp_path_factory.mktemp("flipped")
    data = bytearray(sealed(content()))
    data[position % len(data)] ^= 1 << bit
    (folder / "manifest.json").write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="manifest.json"):
        read_manifest(folder)


def make(step):
    return Snapshot({"model": {"w": torch.full((4,), float(step))}}, {"step": step})


def test_damaged_checkpoints_are_reported_and_the_newest_intact_one_is_used(tmp_path):
    store = Store.open(tmp_path, keep=None)
    paths = [store.save(make(step)) for step in (1, 2, 3)]
    for path in paths[1:]:
        (path / "model.safetensors").write_bytes(b"")
    lines = []
    path, snapshot = store.newest(lines.append)
    assert (path, snapshot.step) == (paths[0], 1)
    assert [line.split(":")[0] for line in lines] == [str(path / "model.safetensors") for path in paths[:0:-1]]
    assert all(line.endswith("; trying the previous checkpoint") for line in lines)


def test_a_store_without_an_intact_checkpoint_has_no_newest(tmp_path):
    store = Store.open(tmp_path, keep=None)
    for step in (1, 2):
        (store.save(make(step)) / "state.json").unlink()
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is intact; start again with `convolve train`"):
        store.newest(lambda line: None)


def test_pruning_neither_counts_nor_removes_damaged_checkpoints(tmp_path):
    store = Store.open(tmp_path, keep=2)
    damaged = store.save(make(1))
    store.save(make(2))
    (store.paths()[-1] / "state.json").write_bytes(b"")
    store.newest(lambda line: None)
    for step in (3, 4, 5):
        store.save(make(step))
    assert not damaged.exists()
    assert [path.name[-1] for path in store.paths()] == ["2", "4", "5"]


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a.pth", b"anything", "is a pickle; pickles can run code and are never loaded"),
        ("a.dat", b"\x80\x04", "is a pickle; pickles can run code and are never loaded"),
        ("a.dat", b"PK\x03\x04", "is a zip archive, as torch.save writes it, which contains a pickle; pickles"),
        ("a.txt", b"text", "is a file, not a folder"),
    ],
)
def test_a_file_in_place_of_a_run_is_identified_without_loading_it(name, data, problem, tmp_path):
    (tmp_path / name).write_bytes(data)
    for read in (load, find_checkpoints, choose_checkpoint):
        with pytest.raises(CheckpointError, match=f"{name}: {problem}.*give a run folder or one of its checkpoints"):
            read(tmp_path / name)


def test_the_best_checkpoint_is_chosen_before_the_newest(tmp_path):
    store = Store.open(tmp_path / "checkpoints", keep=None)
    paths = [store.save(make(step)) for step in (1, 2, 3)]
    assert choose_checkpoint(tmp_path) == paths[2]
    store.mark_best(paths[1])
    assert choose_checkpoint(tmp_path) == paths[1]
    assert choose_checkpoint(paths[0]) == paths[0]


@pytest.mark.parametrize("mark", [b"", b"step-1", b"\xff", b"../step-000000001", b"step-000000001/.."])
def test_a_best_mark_that_is_no_checkpoint_name_is_rejected(mark, tmp_path):
    (tmp_path / "best.txt").write_bytes(mark)
    with pytest.raises(CheckpointError, match="best.txt: .*; delete the file to continue without it"):
        find_best(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 2**21 + 5])
def test_a_file_that_differs_from_what_was_written_is_found(tmp_path, size):
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    file = tmp_path / "state.json"
    file.write_bytes(data)
    compare_written(tmp_path, {"state.json": data})
    changed = (
        [data + b"x", data[:-1] + bytes([data[-1] ^ 1]), data[:-1], bytes([data[0] ^ 1]) + data[1:]] if size else [b"x"]
    )
    for other in changed:
        file.write_bytes(other)
        with pytest.raises(CheckpointError, match=r"bytes instead of|has other content than was written"):
            compare_written(tmp_path, {"state.json": data})
