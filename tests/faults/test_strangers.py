"""Files from strangers, offered at every door: a pickle never runs, and an archive never writes."""

import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from cifar_files import write_python
from convolve.checkpoint.manifest import encode_manifest
from convolve.checkpoint.store import find_checkpoints, load
from convolve.cli.main import dispatch
from convolve.config.schema import DataConfig
from convolve.data.catalog import CIFAR10, MNIST, Archive, IdxFile
from convolve.data.fetch import unpack_archive
from convolve.data.lookup import open_dataset
from convolve.data.readers.detect import open_images
from convolve.download import ignore_progress
from convolve.errors import CheckpointError, ConvolveError, DataError
from photo_sets import write_every_format

KIND = "pickle offered as another file"


class Canary:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def object_array(flag):
    """An npy file of an object."""
    array, sink = np.empty(1, object), io.BytesIO()
    array[0] = Canary(flag)
    np.save(sink, array, allow_pickle=True)
    return sink.getvalue()


def torch_file(flag):
    """What torch.save writes."""
    sink = io.BytesIO()
    torch.save({"state_dict": Canary(flag)}, sink)
    return sink.getvalue()


PICKLES = {
    "text": lambda flag: pickle.dumps(Canary(flag), 0),
    "binary": lambda flag: pickle.dumps({b"data": Canary(flag), b"labels": [1]}, 2),
    "newest": lambda flag: pickle.dumps(Canary(flag), pickle.HIGHEST_PROTOCOL),
    "torch": torch_file,
    "npy": object_array,
}


@pytest.fixture
def flag(tmp_path):
    """Return the folder that must never appear, after checking that unpickling does create it."""
    path = tmp_path / "ran"
    pickle.loads(PICKLES["text"](path))
    path.rmdir()
    yield path
    assert not path.exists(), "the pickle has run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_every_format(tmp_path_factory.mktemp("whole"))


# Checkpoints, weights and configs, by the command line

NEEDED = {"predict": ["image.png"], "train": []}
DOORS = {
    **{
        command: [command, "FILE", *NEEDED.get(command, [])]
        for command in ("validate", "predict", "export", "serve", "report")
    },
    **{name: [name, "FILE"] for name in ("restore", "average")},
    "bench infer": ["bench", "infer", "FILE"],
    "init-path": ["train", "--config", "lenet-digits", "--init-path", "FILE", "--run-dir", "FILE-run"],
    "config-path": ["train", "--config-path", "FILE", "--config", "mine"],
    "data-dir": ["train", "--data-dir", "FILE"],
}


@pytest.mark.parametrize("ending", ["pth", "safetensors", "yml"])
@pytest.mark.parametrize("door", DOORS)
def test_a_pickle_passed_to_a_command_is_rejected_in_one_line_and_never_runs(door, ending, flag, tmp_path, counted):
    file = tmp_path / f"stranger.{ending}"
    words = [word.replace("FILE", str(file)) for word in DOORS[door]]
    for make in counted.each(KIND, PICKLES.values()):
        file.write_bytes(make(flag))
        with pytest.raises(ConvolveError) as caught:
            dispatch(words)
        assert "\n" not in str(caught.value) and not flag.exists()


@pytest.mark.parametrize("how", PICKLES)
def test_a_pickle_inside_a_sealed_checkpoint_is_rejected_and_never_runs(how, flag, tmp_path, counted):
    files = {"model.safetensors": PICKLES[how](flag), "state.json": b'{"step": 1}'}
    for name, data in {**files, "manifest.json": encode_manifest(files)}.items():
        (tmp_path / name).write_bytes(data)
    with counted.one(KIND), pytest.raises(CheckpointError, match=r"model\.safetensors: is "):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.pth", "model.pt", "weights", "model.ckpt"])
@pytest.mark.parametrize("how", ["text", "newest", "torch"])
def test_the_error_for_a_pickle_as_checkpoint_names_the_file_type(name, how, flag, tmp_path, counted):
    file = tmp_path / name
    file.write_bytes(PICKLES[how](flag))
    for act in counted.each(KIND, (load, find_checkpoints)):
        with pytest.raises(CheckpointError, match=name):
            act(file)


def test_a_manifest_cannot_point_out_of_its_folder(tmp_path):
    (tmp_path / "secret").write_bytes(b"{}")
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "state.json").write_bytes(b'{"step": 1}')
    (folder / "manifest.json").write_bytes(encode_manifest({"../secret": b"{}", "state.json": b'{"step": 1}'}))
    with pytest.raises(CheckpointError, match="'../secret', which is no part"):
        load(folder)


# Data

DATA = {
    "idx": ("mnist", MNIST.files[0].name),
    "npz": ("mnist", "mnist.npz"),
    "cifar-binary": ("cifar-10", CIFAR10.files[0].name),
    "cifar-python": ("cifar-10", "data_batch_1"),
    "folder": ("pictures", "train/class-0/0.jpg"),
    "tar": ("pictures", "train-000000.tar"),
    "tfrecord": ("pictures", "train-00000-of-00003"),
    "raw": ("pictures", "train-images.npy"),
    "raw labels": ("pictures", "train-labels.npy"),
    "metadata": ("pictures", "metadata.json"),
}
PLACES = {"raw labels": "raw", "metadata": "tar"}


def lay_out(kind, whole, place):
    """Write the other files of a format: the damaged one is then really opened."""
    if kind == "cifar-python":
        return write_python(place, CIFAR10)
    if DATA[kind][0] == "pictures":
        return Path(shutil.copytree(whole / PLACES.get(kind, kind), place))
    place.mkdir()
    for file in (CIFAR10 if "cifar" in kind else MNIST).files if kind != "npz" else ():
        (place / file.name).write_bytes(b"\0")
    return place


@pytest.mark.parametrize("kind", DATA)
def test_a_pickle_in_place_of_a_data_file_is_named_and_never_runs(kind, whole, flag, tmp_path, counted):
    folder = lay_out(kind, whole, tmp_path / "data")
    dataset, name = DATA[kind]
    config = DataConfig(dataset=dataset, data_dir=folder, dataset_cache=False)
    for make in counted.each(KIND, PICKLES.values()):
        (folder / name).write_bytes(make(flag))
        with pytest.raises(DataError) as caught:
            found = open_dataset(config, announce=print, progress=ignore_progress)
            raise DataError(f"{folder}: {len(found.train)} entries, of which the stranger is not an image")
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value) and not flag.exists()


def test_a_pickle_in_the_cache_of_indexes_is_made_anew(whole, flag, tmp_path, monkeypatch, counted):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    counts = len(open_images(whole / "tar", "x", ignore_progress).train)
    for index in (tmp_path / "cache" / "indexes").iterdir():
        with counted.one(KIND):
            np.savez(index, allow_pickle=True, stamp=np.array([Canary(flag)], object))
            assert len(open_images(whole / "tar", "x", ignore_progress).train) == counts


# Archives


def evil_members():
    """Names and kinds that would leave the folder, or reach into it from outside."""
    for name in ("../evil", "/tmp/evil", "a/../../evil", "..\\evil", "./../evil"):
        yield tarfile.TarInfo(name), b"evil"
    for kind, target in ((tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "/etc/passwd"), (tarfile.SYMTYPE, "..")):
        link = tarfile.TarInfo(CIFAR10.files[0].name)
        link.type, link.linkname = kind, target
        yield link, b""
    for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE):
        special = tarfile.TarInfo(CIFAR10.files[1].name)
        special.type = kind
        yield special, b""


def pack(members, mode):
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=mode) as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return sink.getvalue()


def tree(folder):
    return sorted(str(path) for path in folder.rglob("*"))


def test_a_downloaded_archive_with_malicious_members_yields_and_writes_nothing(tmp_path):
    """Even one that had the published checksum."""
    data = pack(evil_members(), "w:gz")
    part = tmp_path / "inner" / "cifar.tar.gz"
    part.parent.mkdir()
    part.write_bytes(data)
    before = tree(tmp_path)
    archive = Archive(part.name, len(data), hashlib.sha256(data).hexdigest())
    assert unpack_archive(part, archive, CIFAR10.files) is None
    wanted = IdxFile("evil", 4, hashlib.sha256(b"evil").hexdigest())
    assert unpack_archive(part, archive, [wanted]) == {"evil": b"evil"}, "contents, in memory, by our own name"
    assert tree(tmp_path) == before


def test_a_tar_of_images_with_malicious_members_writes_nothing(whole, tmp_path):
    folder = tmp_path / "inner" / "tar"
    shutil.copytree(whole / "tar", folder)
    image = (whole / "folder" / "train" / "class-0" / "0.jpg").read_bytes()
    members = [(tarfile.TarInfo(f"../../evil{number}.{ending}"), data) for number in range(7)
               for ending, data in (("jpg", image), ("cls", b"1"))]  # fmt: skip
    (folder / "train-000000.tar").write_bytes(pack([*members, *list(evil_members())[5:]], "w"))
    before = tree(tmp_path)
    with pytest.raises(DataError, match="links to /etc/passwd, which is not before it in the tar"):
        open_images(folder, "x", ignore_progress)
    (folder / "train-000000.tar").write_bytes(pack(members, "w"))
    before = tree(tmp_path)
    found = open_images(folder, "x", ignore_progress)
    assert found.train.read(0) == image
    assert tree(tmp_path) == before


def test_a_tar_member_that_is_a_link_is_not_read_as_an_image(whole, tmp_path):
    folder = shutil.copytree(whole / "tar", tmp_path / "tar")
    (folder / "metadata.json").unlink()
    link = tarfile.TarInfo("000000000.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    (Path(folder) / "train-000000.tar").write_bytes(pack([(link, b""), (tarfile.TarInfo("000000000.cls"), b"1")], "w"))
    with pytest.raises(DataError, match="sample 000000000: no image among cls"):
        open_images(Path(folder), "x", ignore_progress)


def test_a_state_that_is_deeply_nested_or_huge_is_one_line(tmp_path):
    for state in (
        b"[" * 100_000,
        b'{"step": ' + b"9" * 5000 + b"}",
        json.dumps({"step": [1]}).encode(),
        struct.pack("d", 1),
    ):
        files = {"state.json": state}
        for name, data in {**files, "manifest.json": encode_manifest(files)}.items():
            (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=r"state\.json"):
            load(tmp_path)
