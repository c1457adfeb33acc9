"""Whatever happens to a checkpoint or during a save: it is told in one line, and the newest good one loads."""

import errno
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from convolve.checkpoint.failpoint import VARIABLE
from convolve.checkpoint.manifest import encode_manifest, verify
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import Store, find, load
from convolve.errors import CheckpointError

FILES = ("model.safetensors", "optimizer.safetensors", "averages.safetensors", "state.json", "manifest.json")
BEFORE = ["temp-made", *(f"{stage}:{file}" for file in FILES for stage in ("wrote", "synced")), "temp-synced"]
AFTER = ["renamed", "parent-synced", "verified", "withdrawn", "half-removed", "removed"]
BEST = ["wrote:best.txt", "synced:best.txt", "best-renamed"]


def make(step: int, value: float = 0.0) -> Snapshot:
    def part() -> dict[str, torch.Tensor]:
        return {"a": torch.full((30,), value or float(step)), "n": torch.tensor(step)}

    return Snapshot({"model": part(), "optimizer": part(), "averages": part()}, {"step": step, "seen": step * 64})


def value_of(snapshot: Snapshot) -> float:
    values = {float(part["a"][0]) for part in snapshot.tensors.values()}
    assert len(values) == 1, "parts of different snapshots are mixed"
    return values.pop()


def one_line(caught: pytest.ExceptionInfo[CheckpointError]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Store, Path, Path]:
    store = Store(tmp_path / "checkpoints", keep=None)
    return store, store.save(make(1)), store.save(make(2))


def assert_falls_back(store: Store, damaged: Path) -> None:
    """The damaged checkpoint is named once, and the one before it is used."""
    said: list[str] = []
    path, snapshot = store.newest(said.append)
    assert snapshot.step == 1 and value_of(snapshot) == 1.0
    assert path.name == "step-000000001"
    assert len(said) == 1 and damaged.name in said[0] and "\n" not in said[0]


# Damage at rest


@pytest.mark.parametrize("name", FILES)
def test_truncation_at_every_64th_is_named_and_the_checkpoint_before_is_used(
    name: str, pair: tuple[Store, Path, Path]
) -> None:
    store, _, newest = pair
    file = newest / name
    whole = file.read_bytes()
    for part in range(64):
        file.write_bytes(whole[: len(whole) * part // 64])
        with pytest.raises(CheckpointError, match=name) as caught:
            load(newest)
        one_line(caught)
        assert_falls_back(store, newest)
    file.write_bytes(whole)
    assert load(newest).step == 2


def test_each_of_256_flipped_bytes_over_the_whole_folder_is_detected(pair: tuple[Store, Path, Path]) -> None:
    store, _, newest = pair
    places = [(newest / name, at) for name in FILES for at in range((newest / name).stat().st_size)]
    for number in range(256):
        file, at = places[number * len(places) // 256]
        whole = file.read_bytes()
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << number % 8)]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=newest.name) as caught:
            load(newest)
        one_line(caught)
        assert_falls_back(store, newest)
        file.write_bytes(whole)
    assert load(newest).step == 2


def test_every_byte_of_the_manifest_counts(pair: tuple[Store, Path, Path]) -> None:
    _, _, newest = pair
    file = newest / "manifest.json"
    whole = file.read_bytes()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match="manifest.json"):
            verify(newest)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_part_is_named(name: str, pair: tuple[Store, Path, Path]) -> None:
    store, _, newest = pair
    (newest / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: damaged checkpoint .missing"):
        load(newest)
    assert store.newest(str)[1].step == 1


def test_a_part_of_another_checkpoint_is_detected(pair: tuple[Store, Path, Path]) -> None:
    store, older, newest = pair
    shutil.copy(older / "optimizer.safetensors", newest / "optimizer.safetensors")
    assert_falls_back(store, newest)


def test_when_all_are_damaged_each_is_named_and_the_end_is_one_line(pair: tuple[Store, Path, Path]) -> None:
    store, older, newest = pair
    for path in (older, newest):
        (path / "model.safetensors").write_bytes(b"")
    said: list[str] = []
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is whole") as caught:
        store.newest(said.append)
    one_line(caught)
    assert [name in line for name, line in zip((newest.name, older.name), said, strict=True)] == [True, True]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for step in (1, 2):
        store.save(make(step))
    (tmp_path / "step-000000002" / "model.safetensors").write_bytes(b"")
    assert store.newest(str)[1].step == 1
    store.save(make(3))
    assert [load(tmp_path / f"step-00000000{step}").step for step in (1, 3)] == [1, 3]


def test_a_newer_format_is_told_apart_from_damage(
    pair: tuple[Store, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, newest = pair
    files = {name: (newest / name).read_bytes() for name in FILES[:-1]}
    monkeypatch.setattr("convolve.checkpoint.manifest.VERSION", 2)
    (newest / "manifest.json").write_bytes(encode_manifest(files))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="version 2: this convolve reads .* version 1"):
        load(newest)


def test_a_manifest_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"{}")
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "state.json").write_bytes(b'{"step": 1}')
    (folder / "manifest.json").write_bytes(encode_manifest({"../secret": b"{}", "state.json": b'{"step": 1}'}))
    with pytest.raises(CheckpointError, match="'../secret', which is no part"):
        load(folder)


def test_a_pipe_in_place_of_a_part_does_not_hang(pair: tuple[Store, Path, Path]) -> None:
    store, _, newest = pair
    (newest / "model.safetensors").unlink()
    os.mkfifo(newest / "model.safetensors")
    assert_falls_back(store, newest)


# Pickles


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["model.pth", "model.pt", "weights", "model.ckpt"])
@pytest.mark.parametrize("how", ["pickle", "text pickle", "torch"])
def test_a_pickle_given_as_a_checkpoint_is_refused_and_never_runs(name: str, how: str, tmp_path: Path) -> None:
    flag, file = tmp_path / "ran", tmp_path / name
    if how == "torch":
        torch.save({"x": Canary(flag)}, file)
    else:
        file.write_bytes(pickle.dumps(Canary(flag), protocol=0 if how == "text pickle" else 4))
    for act in (load, find):
        with pytest.raises(CheckpointError, match=name) as caught:
            act(file)
        one_line(caught)
    assert not flag.exists()


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickle_inside_a_sealed_checkpoint_is_refused_and_never_runs(how: str, tmp_path: Path) -> None:
    flag, file = tmp_path / "ran", tmp_path / "model.safetensors"
    if how == "torch":
        torch.save({"x": Canary(flag)}, file)
    else:
        file.write_bytes(pickle.dumps(Canary(flag)))
    files = {"model.safetensors": file.read_bytes(), "state.json": b'{"step": 1}'}
    (tmp_path / "state.json").write_bytes(files["state.json"])
    (tmp_path / "manifest.json").write_bytes(encode_manifest(files))
    with pytest.raises(CheckpointError, match="model.safetensors: is a .*pickles are never loaded"):
        load(tmp_path)
    assert not flag.exists()


# Kills during a save


def save_until_killed(folder: Path, stage: str, step: int, value: float) -> None:
    os.environ[VARIABLE] = stage
    Store(folder, keep=2).save(make(step, value))


def mark_until_killed(folder: Path, stage: str, name: str) -> None:
    os.environ[VARIABLE] = stage
    Store(folder, keep=2).mark_best(folder / name)


@pytest.fixture(scope="module")
def fork() -> Iterator[multiprocessing.context.ForkServerContext]:
    """Children that start from a process which has torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "convolve.checkpoint.store"])
    yield context


def run_and_die(context: multiprocessing.context.ForkServerContext, act: object, *arguments: object) -> None:
    child = context.Process(target=act, args=arguments)  # type: ignore[arg-type]
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL, "the stage was not reached"


def reopen(folder: Path) -> tuple[Store, float]:
    """Open the store as a restore does: the newest loads without complaint, and nothing half-done is left."""
    store = Store(folder, keep=2)
    said: list[str] = []
    _, snapshot = store.newest(said.append)
    assert said == []
    for path in store.paths():
        verify(path)
    assert not [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]
    return store, value_of(snapshot)


@pytest.mark.parametrize("stage", [*BEFORE, *AFTER])
def test_after_a_kill_at_any_stage_of_a_save_the_newest_good_checkpoint_loads(
    stage: str, tmp_path: Path, fork: multiprocessing.context.ForkServerContext
) -> None:
    store = Store(tmp_path, keep=2)
    for step in (1, 2):
        store.save(make(step))
    run_and_die(fork, save_until_killed, tmp_path, stage, 3, 0.0)
    store, value = reopen(tmp_path)
    assert value == (2.0 if stage in BEFORE else 3.0)
    assert len(store.paths()) >= 2
    store.save(make(4))
    assert reopen(tmp_path)[1] == 4.0


@pytest.mark.parametrize("stage", ["temp-synced", "set-aside", "renamed", "parent-synced", "verified"])
def test_after_a_kill_while_a_step_is_replaced_the_old_or_the_new_one_loads(
    stage: str, tmp_path: Path, fork: multiprocessing.context.ForkServerContext
) -> None:
    Store(tmp_path, keep=2).save(make(1))
    Store(tmp_path, keep=2).save(make(2, 20.0))
    run_and_die(fork, save_until_killed, tmp_path, stage, 2, 21.0)
    assert reopen(tmp_path)[1] == (20.0 if stage in ("temp-synced", "set-aside") else 21.0)


@pytest.mark.parametrize("stage", BEST)
def test_after_a_kill_while_the_best_is_marked_the_old_or_the_new_mark_holds(
    stage: str, tmp_path: Path, fork: multiprocessing.context.ForkServerContext
) -> None:
    store = Store(tmp_path, keep=2)
    first, second = store.save(make(1)), store.save(make(2))
    store.mark_best(first)
    run_and_die(fork, mark_until_killed, tmp_path, stage, second.name)
    store, _ = reopen(tmp_path)
    assert store.best == (second if stage == "best-renamed" else first)


# Disks that refuse


def assert_save_is_refused(store: Store, snapshot: Snapshot, words: str) -> None:
    before = {path: sorted(entry.stat().st_mtime_ns for entry in path.iterdir()) for path in store.paths()}
    with pytest.raises(CheckpointError, match=words) as caught:
        store.save(snapshot)
    assert str(store.folder) in one_line(caught) and "MiB free" in str(caught.value)
    assert {path: sorted(entry.stat().st_mtime_ns for entry in path.iterdir()) for path in store.paths()} == before
    assert not [entry.name for entry in store.folder.iterdir() if entry.name.startswith(".")]
    for path in before:
        verify(path)


def test_a_disk_that_takes_no_more_bytes_leaves_the_older_checkpoints_and_no_rest(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for step in (1, 2):
        store.save(make(step))
    large = make(3)
    large.tensors["optimizer"]["a"] = torch.ones(100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
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
def test_a_full_disk_is_told_with_the_free_space_and_nothing_is_lost(size: str, saved: int, tmp_path: Path) -> None:
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
    assert last == f"{saved} {min(saved, 2)} []"
    if saved < 8:
        assert len(error) == 1 and os.strerror(errno.ENOSPC) in error[0] and "MiB free" in error[0]


def test_a_read_only_folder_is_told_and_nothing_is_lost() -> None:
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
            assert_save_is_refused(store, make(3), os.strerror(errno.EACCES))
            with pytest.raises(CheckpointError, match="the mark of the best"):
                store.mark_best(store.paths()[0])
        finally:
            if root:
                os.seteuid(0)
            store.folder.chmod(0o755)
