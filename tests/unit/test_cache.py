"""The cache: entries with size and last use, and what is removed."""

import json
import os

import pytest

from convolve.cache import find_entries, list_cache, remove_entries
from convolve.cli.main import dispatch
from convolve.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Fill a cache with two weights, features, a data set, indexes and what is not listed."""
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "cache"
    files = {
        "weights/timm-resnet50.a1_in1k/model.safetensors": b"x" * 100,
        "weights/timm-resnet50.a1_in1k/weights.json": json.dumps({"name": "timm:resnet50.a1_in1k"}).encode(),
        "weights/broken/weights.json": b"[",
        "features/0123.bin": b"x" * 30,
        "features/0123.lock": b"",
        "datasets/mnist/train": b"x" * 7,
        "indexes/1.npz": b"x" * 5,
        "indexes/2.npz": b"x" * 6,
        "cpu-1.json": b"{}",
    }
    for number, (name, content) in enumerate(files.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (1e9 + number, 1e9 + number))
    (tmp_path / "outside").write_text("kept")
    (root / "features" / "link.bin").symlink_to(tmp_path / "outside")
    return root


def test_entries_have_the_name_that_selects_them_their_size_and_last_use(cache):
    entries = [(entry.kind, entry.name, entry.bytes, int(entry.last_use.timestamp() - 1e9)) for entry in list_cache()]
    size = 100 + (cache / "weights/timm-resnet50.a1_in1k/weights.json").stat().st_size
    assert entries == [
        ("weights", "broken", 1, 2),
        ("weights", "timm:resnet50.a1_in1k", size, 1),
        ("features", "0123.bin", 30, 3),
        ("datasets", "mnist", 7, 5),
        ("indexes", "indexes", 11, 7),
    ]
    assert [entry.name for entry in list_cache(["features"])] == ["0123.bin"]


def test_only_named_entries_are_removed(cache):
    chosen = find_entries(["timm:resnet50.a1_in1k", "indexes"], list_cache())
    remove_entries(chosen)
    assert [entry.name for entry in list_cache()] == ["broken", "0123.bin", "mnist"]
    with pytest.raises(ConfigError, match="cache remove mnst: not in the cache; did you mean mnist"):
        find_entries(["mnst"], list_cache())


def test_the_command_lists_and_removes(cache, tmp_path, capsys):
    assert dispatch(["cache", "--kind", "weights", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed["entries"]] == ["broken", "timm:resnet50.a1_in1k"]
    assert dispatch(["cache"]) == 0
    assert "5 entries, " in capsys.readouterr().out
    assert dispatch(["cache", "remove", "--all", "--kind", "features"]) == 0
    assert capsys.readouterr().out == "removed 1 entries, 30 B\n"
    assert dispatch(["cache", "remove", "--all"]) == 0
    assert list_cache() == []
    assert (tmp_path / "outside").read_text() == "kept"


@pytest.mark.parametrize("words", [["remove"], ["remove", "mnist", "--all"], ["list", "mnist"]])
def test_unclear_requests_are_rejected(words):
    with pytest.raises(ConfigError, match="cache (remove: give either names or --all|list: takes no names)"):
        dispatch(["cache", *words])
    assert len(list_cache()) == 5


def test_an_empty_cache_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "none"))
    assert list_cache() == []
