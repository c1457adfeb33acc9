"""A store keeps a run's checkpoints in order: saving, finding, pruning, marking, sweeping."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from convolve.checkpoint.manifest import verify
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import Store, find_best, find_checkpoints, load
from convolve.errors import CheckpointError


def make(step: int, value: float = 0.0) -> Snapshot:
    return Snapshot({"model": {"w": torch.full((8,), value or float(step))}}, {"step": step})


def steps(store: Store) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in store.paths()]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def find_dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_save_makes_one_folder_named_by_its_step_and_nothing_else(tmp_path: Path) -> None:
    path = Store.open(tmp_path / "run" / "checkpoints", keep=None).save(make(1234))
    assert path.name == "step-000001234"
    assert names(path.parent) == ["step-000001234"]
    assert names(path) == ["manifest.json", "model.safetensors", "state.json"]


def test_paths_ascend_by_step_even_beyond_nine_digits(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=None)
    for step in (10**10, 5, 10**9, 0, 40):
        store.save(make(step))
    assert steps(store) == [0, 5, 40, 10**9, 10**10]


def test_a_folder_without_manifest_or_with_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=None)
    store.save(make(1))
    (tmp_path / "step-000000002").mkdir()
    (tmp_path / "step-3").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert steps(store) == [1]


def test_a_store_that_is_only_opened_makes_no_folder(tmp_path: Path) -> None:
    assert Store.open(tmp_path / "none", keep=2).paths() == []
    assert not (tmp_path / "none").exists()


def test_tensors_changed_after_a_save_do_not_change_the_file(tmp_path: Path) -> None:
    snapshot = make(1)
    path = Store.open(tmp_path, keep=None).save(snapshot)
    snapshot.tensors["model"]["w"].fill_(99)
    snapshot.state["step"] = 5
    back = load(path)
    assert back.tensors["model"]["w"].tolist() == [1.0] * 8 and back.step == 1


def test_saving_an_equal_step_again_touches_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=None)
    path = store.save(make(1))
    before = {file.name: file.stat().st_ino for file in path.iterdir()}
    assert store.save(make(1)) == path
    assert {file.name: file.stat().st_ino for file in path.iterdir()} == before


def test_saving_another_content_for_a_step_replaces_it(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=None)
    store.save(make(1, value=3.0))
    path = store.save(make(1, value=4.0))
    assert load(path).tensors["model"]["w"][0] == 4
    assert names(tmp_path) == ["step-000000001"]


def test_saving_over_a_damaged_step_repairs_it(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=None)
    path = store.save(make(1))
    (path / "model.safetensors").write_bytes(b"gone")
    verify(store.save(make(1)))


@pytest.mark.parametrize(
    ("keep", "left"), [(None, [1, 2, 3, 4, 5]), (1, [4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_the_newest_are_kept_and_two_at_least(keep: int | None, left: list[int], tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=keep)
    for step in range(1, 6):
        store.save(make(step))
    assert steps(store) == left
    assert names(tmp_path) == [path.name for path in store.paths()]


def test_the_best_is_never_pruned_until_another_is_better(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=2)
    store.mark_best(store.save(make(1)))
    for step in range(2, 6):
        store.save(make(step))
    assert steps(store) == [1, 4, 5]
    store.mark_best(store.paths()[1])
    store.save(make(6))
    store.save(make(7))
    assert steps(store) == [4, 6, 7]


def test_the_mark_of_the_best_outlives_the_process(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=2)
    path = store.save(make(1))
    assert store.best is None
    store.mark_best(path)
    assert Store.open(tmp_path, keep=2).best == path


def test_only_a_checkpoint_of_the_store_can_be_its_best(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "a", keep=2)
    store.save(make(1))
    other = Store.open(tmp_path / "b", keep=2).save(make(1))
    for path in (other, tmp_path / "a" / "step-000000002"):
        with pytest.raises(CheckpointError, match="cannot be its best"):
            store.mark_best(path)


def test_an_invalid_best_mark_is_rejected_and_that_of_a_deleted_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / "best.txt").write_text("../../etc")
    with pytest.raises(CheckpointError, match="best.txt.*delete"):
        Store.open(tmp_path, keep=2)
    (tmp_path / "best.txt").write_text("step-000000009\n")
    assert Store.open(tmp_path, keep=2).best is None


def test_the_checkpoint_just_saved_is_never_pruned_if_later_steps_exist(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=None)
    for step in (10, 20, 30):
        store.save(make(step))
    path = Store.open(tmp_path, keep=2).save(make(5))
    assert path.is_dir() and steps(store) == [5, 10, 20, 30]


def test_the_newest_is_returned_with_its_content(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=None)
    store.save(make(3))
    store.save(make(12))
    said: list[str] = []
    path, snapshot = store.newest(said.append)
    assert (path.name, snapshot.step, said) == ("step-000000012", 12, [])


def test_an_empty_store_has_no_newest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        Store.open(tmp_path, keep=2).newest(print)


def test_leftovers_of_dead_processes_are_swept_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    Store.open(tmp_path, keep=None).save(make(1))
    dead, living = find_dead_pid(), os.getppid()
    for name in (f".tmp-2-{dead}", f".gone-1-{dead}", f".tmp-3-{os.getpid()}", f".tmp-4-{living}", ".mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / f".tmp-best-{dead}").write_text("step")
    Store.open(tmp_path, keep=None)
    assert names(tmp_path) == [".mine", f".tmp-4-{living}", "step-000000001"]


def test_a_checkpoint_set_aside_by_a_dead_process_is_restored_unless_it_was_replaced(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=None)
    dead = find_dead_pid()
    store.save(make(1)).rename(tmp_path / f".old-1-{dead}")
    store.save(make(2, value=7.0)).rename(tmp_path / f".old-2-{dead}")
    store.save(make(2, value=8.0))
    again = Store.open(tmp_path, keep=None)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    assert [float(load(path).tensors["model"]["w"][0]) for path in again.paths()] == [1.0, 8.0]


def test_find_takes_a_run_a_checkpoints_folder_or_one_checkpoint(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "run" / "checkpoints", keep=None)
    paths = [store.save(make(step)) for step in (1, 2)]
    assert find_checkpoints(tmp_path / "run") == paths
    assert find_checkpoints(tmp_path / "run" / "checkpoints") == paths
    assert find_checkpoints(paths[0]) == paths[:1]
    moved = paths[0].rename(tmp_path / "my favorite")
    assert find_checkpoints(moved) == [moved] and load(moved).step == 1


def test_find_and_load_name_the_expected_folder_if_nothing_is_found(tmp_path: Path) -> None:
    for act in (find_checkpoints, load):
        with pytest.raises(CheckpointError, match="no such folder; give a run folder"):
            act(tmp_path / "none")
    with pytest.raises(CheckpointError, match="contains no checkpoint; give a run folder"):
        find_checkpoints(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        find_checkpoints(tmp_path)


def test_the_error_for_one_file_of_a_checkpoint_names_its_folder(tmp_path: Path) -> None:
    path = Store.open(tmp_path, keep=None).save(make(1))
    with pytest.raises(CheckpointError, match=f"give its folder, {path}"):
        find_checkpoints(path / "model.safetensors")


def test_a_file_in_place_of_the_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match="step-000000001: cannot write") as caught:
        Store.open(tmp_path / "run" / "checkpoints", keep=2).save(make(1))
    assert "\n" not in str(caught.value)


def test_looking_for_the_best_changes_nothing_in_the_folder(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=None)
    path = store.save(make(1))
    assert find_best(tmp_path) is None
    store.mark_best(path)
    (tmp_path / f".tmp-2-{find_dead_pid()}").mkdir()
    before = names(tmp_path)
    assert find_best(tmp_path) == path
    assert names(tmp_path) == before
