"""Damage to a checkpoint or during a save is a one-line error, and the newest good checkpoint loads."""

import os
import shutil
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from convolve.checkpoint.manifest import encode_manifest, verify
from convolve.checkpoint.ranks import Ranks
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import Store, load
from convolve.errors import CheckpointError
from convolve.files import FAILPOINT_VARIABLE, draft_owner
from fault_ledger import Ledger
from forked_commands import FORKS
from snapshots import make, reopen, value_of

FILES = ("model.safetensors", "optimizer.safetensors", "averages.safetensors", "state.json", "manifest.json")
BEFORE = ["temp-made", *(f"{stage}:{file}" for file in FILES for stage in ("wrote", "synced")), "temp-synced"]
AFTER = ["renamed", "parent-synced", "verified", "withdrawn", "half-removed", "removed"]
BEST = ["wrote:best.txt", "synced:best.txt", "renamed:best.txt"]


def one_line(caught: pytest.ExceptionInfo[CheckpointError]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Store, Path, Path]:
    store = Store.open(tmp_path / "checkpoints", keep=None)
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
    name: str, pair: tuple[Store, Path, Path], counted: Ledger
) -> None:
    store, _, newest = pair
    file = newest / name
    whole = file.read_bytes()
    for part in counted.each("checkpoint file cut at a 64th", range(64)):
        file.write_bytes(whole[: len(whole) * part // 64])
        with pytest.raises(CheckpointError, match=name) as caught:
            load(newest)
        one_line(caught)
        assert_falls_back(store, newest)
    file.write_bytes(whole)
    assert load(newest).step == 2


def test_each_of_256_flipped_bytes_over_the_whole_folder_is_detected(
    pair: tuple[Store, Path, Path], counted: Ledger
) -> None:
    store, _, newest = pair
    places = [(newest / name, at) for name in FILES for at in range((newest / name).stat().st_size)]
    for number in counted.each("checkpoint byte flipped", range(256)):
        file, at = places[number * len(places) // 256]
        whole = file.read_bytes()
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << number % 8)]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=newest.name) as caught:
            load(newest)
        one_line(caught)
        assert_falls_back(store, newest)
        file.write_bytes(whole)
    assert load(newest).step == 2


def test_every_byte_of_the_manifest_counts(pair: tuple[Store, Path, Path], counted: Ledger) -> None:
    _, _, newest = pair
    file = newest / "manifest.json"
    whole = file.read_bytes()
    for at in counted.each("checkpoint byte flipped", range(len(whole))):
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
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is intact") as caught:
        store.newest(said.append)
    one_line(caught)
    assert [name in line for name, line in zip((newest.name, older.name), said, strict=True)] == [True, True]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    store = Store.open(tmp_path, keep=2)
    for step in (1, 2):
        store.save(make(step))
    (tmp_path / "step-000000002" / "model.safetensors").write_bytes(b"")
    assert store.newest(str)[1].step == 1
    store.save(make(3))
    assert [load(tmp_path / f"step-00000000{step}").step for step in (1, 3)] == [1, 3]


def test_a_newer_format_is_distinguished_from_damage(
    pair: tuple[Store, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, newest = pair
    files = {name: (newest / name).read_bytes() for name in FILES[:-1]}
    monkeypatch.setattr("convolve.checkpoint.manifest.VERSION", 3)
    (newest / "manifest.json").write_bytes(encode_manifest(files))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="version 3: this convolve reads .* versions 1 and 2"):
        load(newest)


def test_a_pipe_in_place_of_a_part_does_not_hang(pair: tuple[Store, Path, Path]) -> None:
    store, _, newest = pair
    (newest / "model.safetensors").unlink()
    os.mkfifo(newest / "model.safetensors")
    assert_falls_back(store, newest)


# Kills during a save


def save_until_killed(folder: Path, stage: str, step: int, value: float) -> None:
    os.environ[FAILPOINT_VARIABLE] = stage
    Store.open(folder, keep=2).save(make(step, value))


def mark_until_killed(folder: Path, stage: str, name: str) -> None:
    os.environ[FAILPOINT_VARIABLE] = stage
    Store.open(folder, keep=2).mark_best(folder / name)


def run_and_die(act: object, *arguments: object) -> None:
    """Act in a new process, forked from one that has imported torch."""
    child = FORKS.Process(target=act, args=arguments)  # type: ignore[arg-type]
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL, "the stage was not reached"


@pytest.mark.parametrize("stage", [*BEFORE, *AFTER])
def test_after_a_kill_at_any_stage_of_a_save_the_newest_good_checkpoint_loads(
    stage: str, tmp_path: Path, counted: Ledger
) -> None:
    store = Store.open(tmp_path, keep=2)
    for step in (1, 2):
        store.save(make(step))
    with counted.one("SIGKILL at a stage of a save"):
        run_and_die(save_until_killed, tmp_path, stage, 3, 0.0)
        store, value = reopen(tmp_path)
        assert value == (2.0 if stage in BEFORE else 3.0)
        assert len(store.paths()) >= 2
        store.save(make(4))
        assert reopen(tmp_path)[1] == 4.0


@pytest.mark.parametrize("stage", ["temp-synced", "set-aside", "renamed", "parent-synced", "verified"])
def test_after_a_kill_while_a_step_is_replaced_the_old_or_the_new_one_loads(
    stage: str, tmp_path: Path, counted: Ledger
) -> None:
    Store.open(tmp_path, keep=2).save(make(1))
    Store.open(tmp_path, keep=2).save(make(2, 20.0))
    with counted.one("SIGKILL at a stage of a save"):
        run_and_die(save_until_killed, tmp_path, stage, 2, 21.0)
        assert reopen(tmp_path)[1] == (20.0 if stage in ("temp-synced", "set-aside") else 21.0)


def save_slice_until_killed(folder: Path, rank: int, peer: Connection, stage: str) -> None:
    """Save step 3 as one of two processes; `peer` is the connection to the other one."""

    def exchange(text: str) -> list[str]:
        peer.send(text)
        return [text, peer.recv()] if rank == 0 else [peer.recv(), text]

    owner = exchange(draft_owner())[0]
    os.environ[FAILPOINT_VARIABLE] = stage
    tensors = {part: {f"{part}{rank}": named["a"]} for part, named in make(3).tensors.items()}
    snapshot = Snapshot(tensors, {"step": 3}, dict.fromkeys(tensors, (rank, 2)))
    Store(folder, keep=2, ranks=Ranks(rank, rank == 0, owner, exchange)).save(snapshot)


def slices_of(rank: int) -> list[str]:
    return [f"{part}-0000{rank + 1}-of-00002.safetensors" for part in ("model", "optimizer", "averages")]


SLICE_STAGES = [
    (rank, stage)
    for rank in (0, 1)
    for stage in ["temp-made", *(f"{act}:{file}" for file in slices_of(rank) for act in ("wrote", "synced"))]
]
MANIFEST_STAGES = [(0, stage) for stage in [*BEFORE[-3:], *AFTER]]


@pytest.mark.parametrize(("rank", "stage"), [*SLICE_STAGES, *MANIFEST_STAGES])
def test_after_a_kill_of_one_of_two_savers_the_newest_good_checkpoint_loads(
    rank: int, stage: str, tmp_path: Path, counted: Ledger
) -> None:
    store = Store.open(tmp_path, keep=2)
    for step in (1, 2):
        store.save(make(step))
    with counted.one("SIGKILL of one of two savers"):
        peers = FORKS.Pipe()
        savers = [
            FORKS.Process(
                target=save_slice_until_killed, args=(tmp_path, number, peers[number], stage if number == rank else "")
            )
            for number in (0, 1)
        ]
        for saver in savers:
            saver.start()
        for peer in peers:
            peer.close()
        for saver in savers:
            saver.join(60)
        assert savers[rank].exitcode == -signal.SIGKILL, "the stage was not reached"
        store = Store.open(tmp_path, keep=2)
        assert store.newest(str)[1].step == (3 if stage in AFTER else 2)
        assert not [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")]
        assert len(store.paths()) >= 2


@pytest.mark.parametrize("stage", BEST)
def test_after_a_kill_while_the_best_is_marked_the_old_or_the_new_mark_holds(
    stage: str, tmp_path: Path, counted: Ledger
) -> None:
    store = Store.open(tmp_path, keep=2)
    first, second = store.save(make(1)), store.save(make(2))
    store.mark_best(first)
    with counted.one("SIGKILL at a stage of a save"):
        run_and_die(mark_until_killed, tmp_path, stage, second.name)
        store, _ = reopen(tmp_path)
        assert store.best == (second if stage == "renamed:best.txt" else first)
