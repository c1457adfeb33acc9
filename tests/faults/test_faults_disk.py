"""Disks that refuse: a save that cannot be made is told in one line, and what was there before stays whole."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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
    told = str(caught.value)
    assert str(store.folder) in told and "MiB free" in told and "\n" not in told
    assert {path: sorted(entry.stat().st_mtime_ns for entry in path.iterdir()) for path in store.paths()} == before
    assert not [entry.name for entry in store.folder.iterdir() if entry.name.startswith(".")]
    for path in before:
        verify(path)


def test_a_disk_that_takes_no_more_bytes_leaves_the_older_checkpoints_and_no_rest(
    tmp_path: Path, counted: Ledger
) -> None:
    store = Store(tmp_path, keep=2)
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
import sys
from pathlib import Path
import torch
from convolve.checkpoint.manifest import verify
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import Store
from convolve.errors import CheckpointError

store = Store(Path(sys.argv[1]) / "checkpoints", keep=2)
saved = 0
try:
    for step in range(1, 9):
        store.save(Snapshot({"model": {"w": torch.full((60_000,), float(step))}}, {"step": step}))
        saved = step
except CheckpointError as error:
    print(error)
store.newest(lambda text: sys.exit(f"damaged: {text}"))
for path in store.paths():
    verify(path)
print(saved, len(store.paths()), [entry.name for entry in store.folder.iterdir() if entry.name.startswith(".")])
"""


@pytest.mark.parametrize(("size", "saved"), [("400k", 1), ("600k", 2), ("1200k", 8)])
def test_a_full_disk_is_told_with_the_free_space_and_nothing_is_lost(
    size: str, saved: int, tmp_path: Path, counted: Ledger
) -> None:
    """A small disk of its own, in a mount namespace that ends with the child. One checkpoint is 235 KiB."""
    mount = f"mount -t tmpfs -o size={size} none '{tmp_path}'"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("this user may not mount")
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        f'{mount} && exec "$@"',
        "sh",
        sys.executable,
        "-c",
        FULL_DISK,
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    *error, last = done.stdout.splitlines()
    with counted.one("full disk"):
        assert last == f"{saved} {min(saved, 2)} []"
        assert len(error) == (saved < 8)
        assert all(os.strerror(errno.ENOSPC) in line and "MiB free" in line for line in error)


def test_a_read_only_folder_is_told_and_nothing_is_lost(counted: Ledger) -> None:
    """A fresh folder that another user could enter, since root may write anywhere."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        store = Store(Path(place) / "checkpoints", keep=2)
        for step in (1, 2):
            store.save(make(step))
        store.folder.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            with counted.one("read-only folder"):
                assert_save_is_refused(store, make(3), os.strerror(errno.EACCES))
            with counted.one("read-only folder"), pytest.raises(CheckpointError, match="the mark of the best"):
                store.mark_best(store.paths()[0])
        finally:
            if root:
                os.seteuid(0)
            store.folder.chmod(0o755)
