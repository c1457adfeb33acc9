"""Full and read-only disks: a failed save is a one-line error, and earlier checkpoints stay whole."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from convolve.checkpoint.manifest import verify
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import Store
from convolve.errors import CheckpointError
from fault_ledger import Ledger
from snapshots import make


def assert_save_is_refused(store: Store, snapshot: Snapshot, words: str) -> None:
    before = {path: sorted(entry.stat().st_mtime_ns for entry in path.iterdir()) for path in store.paths()}
    with pytest.raises(CheckpointError, match=words) as caught:
        store.save(snapshot)
    message = str(caught.value)
    assert str(store.folder) in message and "MiB free" in message and "\n" not in message
    assert {path: sorted(entry.stat().st_mtime_ns for entry in path.iterdir()) for path in store.paths()} == before
    assert not [entry.name for entry in store.folder.iterdir() if entry.name.startswith(".")]
    for path in before:
        verify(path)


def test_a_disk_that_takes_no_more_bytes_leaves_the_older_checkpoints_and_no_rest(
    tmp_path: Path, counted: Ledger
) -> None:
    store = Store.open(tmp_path, keep=2)
    for step in (1, 2):
        store.save(make(step))
    large = make(3)
    large.tensors["optimizer"]["a"] = torch.ones(100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with counted.one("full disk"):
            assert_save_is_refused(store, large, os.strerror(errno.EFBIG))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.save(large).name == "step-000000003"


FULL_DISK = """
import json, sys
from pathlib import Path
import torch
from convolve.checkpoint.manifest import verify
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import Store
from convolve.errors import CheckpointError

for folder in sys.argv[1:]:
    store = Store.open(Path(folder) / "checkpoints", keep=2)
    saved, message = 0, []
    try:
        for step in range(1, 9):
            store.save(Snapshot({"model": {"w": torch.full((60_000,), float(step))}}, {"step": step}))
            saved = step
    except CheckpointError as error:
        message = str(error).splitlines()
    store.newest(lambda text: sys.exit(f"damaged: {text}"))
    for path in store.paths():
        verify(path)
    rest = [entry.name for entry in store.folder.iterdir() if entry.name.startswith(".")]
    print(json.dumps({"saved": saved, "kept": len(store.paths()), "rest": rest, "message": message}))
"""
SAVED = {"400k": 1, "600k": 2, "1200k": 8}


@pytest.fixture(scope="module")
def small_disks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of eight saves on disks of several sizes, in a mount namespace that ends with the child."""
    places = {size: tmp_path_factory.mktemp("disk") for size in SAVED}
    mount = " && ".join(f"mount -t tmpfs -o size={size} none '{place}'" for size, place in places.items())
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("this user may not mount")
    inside = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    command = [*inside, sys.executable, "-c", FULL_DISK, *map(str, places.values())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return dict(zip(places, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(("size", "saved"), SAVED.items())
def test_a_full_disk_error_names_the_free_space_and_nothing_is_lost(
    size: str, saved: int, small_disks: dict[str, dict[str, Any]], counted: Ledger
) -> None:
    """One checkpoint is 235 KiB."""
    found = small_disks[size]
    with counted.one("full disk"):
        assert (found["saved"], found["kept"], found["rest"]) == (saved, min(saved, 2), [])
        assert len(found["message"]) == (saved < 8)
        assert all(os.strerror(errno.ENOSPC) in line and "MiB free" in line for line in found["message"])


def test_a_read_only_folder_is_an_error_and_nothing_is_lost(counted: Ledger) -> None:
    """A fresh folder that another user could enter, since root may write anywhere."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        store = Store.open(Path(place) / "checkpoints", keep=2)
        for step in (1, 2):
            store.save(make(step))
        store.folder.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            with counted.one("read-only folder"):
                assert_save_is_refused(store, make(3), os.strerror(errno.EACCES))
            with counted.one("read-only folder"), pytest.raises(CheckpointError, match="best.txt: cannot write"):
                store.mark_best(store.paths()[0])
        finally:
            if root:
                os.seteuid(0)
            store.folder.chmod(0o755)
