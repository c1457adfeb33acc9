"""Checkpoints that are written while training continues."""

import subprocess
import sys
import threading

import pytest
import torch

from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import AsyncSaver, Store, load
from convolve.errors import CheckpointError


def snapshot(step, value=0.0):
    return Snapshot({"model": {"w": torch.full((3,), value)}}, {"step": step})


def stored(path):
    return load(path).tensors["model"]["w"]


class SlowStore(Store):
    """A store whose saves wait until they are let go."""

    def __init__(self, folder):
        super().__init__(folder, keep=None)
        self.gate = threading.Event()

    def save(self, snapshot):
        assert self.gate.wait(10)
        return super().save(snapshot)


def test_the_next_step_does_not_change_the_saved_copy(tmp_path):
    store = SlowStore(tmp_path)
    saver = AsyncSaver(store)
    taken = snapshot(1, 1.0)
    saver.save(taken, best=False)
    taken.tensors["model"]["w"].fill_(2.0)
    store.gate.set()
    assert stored(saver.poll(wait=True)).tolist() == [1.0] * 3


def test_a_save_is_reported_once_after_it_completes(tmp_path):
    store = SlowStore(tmp_path)
    saver = AsyncSaver(store)
    assert saver.poll(wait=True) is None
    saver.save(snapshot(1), best=False)
    assert saver.poll(wait=False) is None and store.paths() == []
    store.gate.set()
    assert saver.poll(wait=True) == tmp_path / "step-000000001"
    assert saver.poll(wait=True) is None


def test_one_save_is_in_progress_at_a_time_and_checkpoints_appear_in_order(tmp_path):
    store = SlowStore(tmp_path)
    saver = AsyncSaver(store)
    saver.save(snapshot(1), best=False)
    with pytest.raises(AssertionError, match="one save at a time"):
        saver.save(snapshot(2), best=False)
    store.gate.set()
    for step in (2, 3):
        saver.poll(wait=True)
        saver.save(snapshot(step), best=False)
    saver.poll(wait=True)
    assert [path.name for path in store.paths()] == [f"step-00000000{step}" for step in (1, 2, 3)]


def test_the_best_is_marked(tmp_path):
    store = Store.open(tmp_path, keep=None)
    saver = AsyncSaver(store)
    for step, best in ((1, True), (2, False)):
        saver.save(snapshot(step), best=best)
        saver.poll(wait=True)
    assert store.best is not None and store.best.name == "step-000000001"


def test_a_failed_save_is_one_line_and_the_next_one_may_succeed(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.write_text("a file where a folder should be")
    saver = AsyncSaver(Store.open(folder, keep=None))
    saver.save(snapshot(1), best=False)
    with pytest.raises(CheckpointError) as caught:
        saver.poll(wait=True)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    folder.unlink()
    saver.save(snapshot(2), best=False)
    assert saver.poll(wait=True) == folder / "step-000000002"


def test_a_process_that_exits_completes_its_last_save(tmp_path):
    script = """
import sys, torch
from pathlib import Path
from convolve.checkpoint.store import AsyncSaver
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import Store
saver = AsyncSaver(Store.open(Path(sys.argv[1]), keep=None))
saver.save(Snapshot({"model": {"w": torch.full((300_000,), 5.0)}}, {"step": 7}), best=True)
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert stored(Store.open(tmp_path, keep=None).best).eq(5).all()
