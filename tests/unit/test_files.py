"""Files and folders exist completely or not at all, and leftovers of killed writers are recovered."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from convolve.errors import ConfigError, ConvolveError
from convolve.files import atomic_file, file_sha256, publish, recover, remove_folder, write_file, write_folder
from convolve.line_file import LineFile
from convolve.run_files import checkpoint_name, is_checkpoint_name, step_of


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def find_dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_file_is_replaced_when_the_block_ends_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_file(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old" and draft.name == "a.txt"
    assert path.read_text() == "new" and names(tmp_path) == ["a.txt"]


def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and names(tmp_path) == ["a.txt"]


def test_a_draft_elsewhere_can_be_published(tmp_path: Path) -> None:
    draft = tmp_path / ".part"
    draft.write_text("grown")
    publish(draft, tmp_path / "a")
    assert (tmp_path / "a").read_text() == "grown" and names(tmp_path) == ["a"]


def test_an_impossible_write_is_one_line_of_the_requested_type(tmp_path: Path) -> None:
    path = tmp_path / "none" / "a"
    with pytest.raises(ConvolveError, match="none/a: cannot write .No such file.*; free disk space or fix permissions"):
        write_file(path, b"")
    with pytest.raises(ConfigError):
        write_file(path, b"", ConfigError)


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a"
    write_folder(path, {"x": b"1", "y": b"2"})
    write_folder(path, {"z": b"3"})
    assert names(path) == ["z"] and names(path.parent) == ["a"]
    assert not remove_folder(path, ["other"].__contains__) and names(path) == ["z"]
    assert remove_folder(path, ["z"].__contains__)
    assert names(path.parent) == []


def test_a_folder_set_aside_is_restored_unless_it_was_replaced(tmp_path: Path) -> None:
    dead = find_dead_pid()
    for name, final in ((f".old-a-{dead}", "a"), (f".old-b-{dead}", "b"), (f".tmp-c-0a1b-{dead}", "c")):
        (tmp_path / name).mkdir()
        (tmp_path / name / final).touch()
    (tmp_path / "b").mkdir()
    (tmp_path / f".tmp-d-{os.getppid()}").mkdir()
    recover(tmp_path)
    assert names(tmp_path) == [f".tmp-d-{os.getppid()}", "a", "b"]
    assert names(tmp_path / "a") == ["a"] and names(tmp_path / "b") == []
    recover(tmp_path / "none")


def test_the_sha256_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    data = os.urandom(3 * 2**20 + 5)
    (tmp_path / "a").write_bytes(data)
    assert file_sha256(tmp_path / "a") == hashlib.sha256(data).hexdigest()


def test_an_incomplete_last_line_is_removed_before_more_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    file = LineFile.open(path)
    file.write("two\nlines")
    file.close()
    assert path.read_bytes() == b"one\ntwo lines\n"


def test_names_of_checkpoints_are_made_and_parsed_alike() -> None:
    for step in (0, 7, 123_456_789, 10**12):
        assert is_checkpoint_name(checkpoint_name(step)) and step_of(Path("x") / checkpoint_name(step)) == step
    assert checkpoint_name(1876) == "step-000001876"
    assert not any(map(is_checkpoint_name, ("step-1", "step-000000001x", "best.txt", ".tmp-step-000000001-5")))
