"""Several processes save and restore one checkpoint; each writes and reads only its tensors."""

import io
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as unpack
from safetensors.torch import save as pack

import thread_collectives
from convolve.checkpoint.manifest import encode_manifest, part_sha256, verify
from convolve.checkpoint.ranks import Ranks
from convolve.checkpoint.snapshot import Snapshot, read_tensors
from convolve.checkpoint.store import Store, load, load_state
from convolve.errors import CheckpointError
from convolve.files import draft_owner

RANKS = 3
SLICED = [f"{part}-0000{rank}-of-00003.safetensors" for part in ("model", "optimizer") for rank in (1, 2, 3)]


def run_ranks(act):
    """Call `act(ranks)` in a thread for each rank; return results or errors by rank."""
    owner = draft_owner()

    def run(collectives):
        rank = collectives.topology.rank
        return act(Ranks(rank, rank == 0, owner, collectives.exchange))

    return thread_collectives.run_ranks(run, replicas=RANKS)


def make(step, rank):
    """Return the tensors of one process, 4000 bytes in each part."""
    tensors = {part: {f"{part}{rank}": torch.full((1000,), step + rank / 4)} for part in ("model", "optimizer")}
    return Snapshot(tensors, {"step": step, "of": rank}, {part: (rank, RANKS) for part in tensors})


def save(folder, step):
    return run_ranks(lambda ranks: Store.open(folder, keep=2, ranks=ranks).save(make(step, ranks.rank)))


def newest(folder, said):
    """Restore on all ranks; each wants the tensors of its number."""

    def restore(ranks):
        announce = said.append if ranks.rank == 0 else str
        return Store(folder, keep=2, ranks=ranks).newest(announce, lambda part, name: name.endswith(str(ranks.rank)))

    return run_ranks(restore)


def test_each_process_writes_its_tensors_and_readers_join_them(tmp_path):
    (path,) = set(save(tmp_path, 1))
    assert sorted(os.listdir(path)) == sorted(["manifest.json", "state.json", *SLICED])
    assert list(unpack((path / "model-00002-of-00003.safetensors").read_bytes())) == ["model1"]
    assert json.loads((path / "manifest.json").read_bytes())["version"] == 2, "older versions must not call it damaged"
    verify(path)
    snapshot = load(path)
    assert [sorted(snapshot.tensors[part]) for part in ("model", "optimizer")] == [
        ["model0", "model1", "model2"],
        ["optimizer0", "optimizer1", "optimizer2"],
    ]
    assert snapshot.state == load_state(path) == {"step": 1, "of": 0}
    assert len(part_sha256(path, "model")) == 64


def test_each_process_restores_the_tensors_that_it_wants(tmp_path):
    save(tmp_path, 1), save(tmp_path, 2)
    for rank, (path, snapshot) in enumerate(newest(tmp_path, [])):
        assert path.name == "step-000000002" and snapshot.step == 2
        assert {part: list(named) for part, named in snapshot.tensors.items()} == {
            "model": [f"model{rank}"],
            "optimizer": [f"optimizer{rank}"],
        }
        assert snapshot.tensors["model"][f"model{rank}"].tolist() == [2 + rank / 4] * 1000


def test_damage_in_the_file_of_one_process_makes_all_of_them_use_the_previous_checkpoint(tmp_path):
    save(tmp_path, 1), save(tmp_path, 2)
    file = tmp_path / "step-000000002" / SLICED[-1]
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    said = []
    assert [path.name for path, _ in newest(tmp_path, said)] == ["step-000000001"] * RANKS
    assert len(said) == 1 and SLICED[-1] in said[0]
    (tmp_path / "step-000000001" / SLICED[0]).unlink()
    assert {str(error) for error in newest(tmp_path, said)} == {
        f"{tmp_path}: none of its 2 checkpoints is intact; start again with `convolve train`"
    }


def test_if_one_process_cannot_write_nothing_is_published_and_all_raise(tmp_path):
    save(tmp_path, 1)

    def fail(ranks):
        snapshot = make(2, ranks.rank)
        if ranks.rank == 1:
            snapshot.tensors["model"]["sparse"] = torch.eye(2).to_sparse()
        return Store(tmp_path, keep=2, ranks=ranks).save(snapshot)

    errors = {str(error) for error in run_ranks(fail)}
    assert len(errors) == 1 and "part 'model' cannot be stored" in errors.pop()
    assert os.listdir(tmp_path) == ["step-000000001"]


def test_hosts_with_different_folders_are_one_line(tmp_path):
    def save_apart(ranks):
        return Store(tmp_path / str(ranks.rank), keep=2, ranks=ranks).save(make(2, ranks.rank))

    error, *_ = run_ranks(save_apart)
    assert "model-00002-of-00003.safetensors, written by another process, is not in the folder of rank 0" in str(error)
    assert os.listdir(tmp_path / "0") == []


def test_a_process_without_tensors_writes_nothing(tmp_path):
    def save_apart(ranks):
        snapshot = Snapshot({"model": {"w": torch.ones(2)}} if ranks.rank == 0 else {}, {"step": 1})
        return Store(tmp_path / str(ranks.rank), keep=2, ranks=ranks).save(snapshot)

    run_ranks(save_apart)
    assert os.listdir(tmp_path) == ["0"]
    assert sorted(os.listdir(tmp_path / "0/step-000000001")) == ["manifest.json", "model.safetensors", "state.json"]


def test_pruning_removes_the_files_of_all_processes(tmp_path):
    for step in range(1, 5):
        save(tmp_path, step)
    assert sorted(os.listdir(tmp_path)) == ["step-000000003", "step-000000004"]


class CountingFile(io.FileIO):
    """Counts the bytes that are read."""

    count = 0

    def read(self, size=-1):
        data = super().read(size)
        self.count += len(data)
        return data


def test_only_the_header_and_the_wanted_tensors_are_read(tmp_path):
    tensors = {f"t{number}": torch.full((1000, number), float(number)) for number in range(10)}
    (tmp_path / "file").write_bytes(pack({**tensors, "empty": torch.zeros(0, 3), "half": torch.ones(3).half()}))
    with CountingFile(tmp_path / "file") as file:
        found = unpack(read_tensors(file, ["t3", "t8", "half", "empty"].__contains__))
        assert 44_006 <= file.count < 46_000
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "t3": (1000, 3),
        "t8": (1000, 8),
        "half": (3,),
        "empty": (0, 3),
    }
    assert torch.equal(found["t3"], tensors["t3"]) and torch.equal(found["t8"], tensors["t8"])


def with_header(header, data=bytes(16)):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


HOSTILE = {
    "no header": b"",
    "a header beyond the file": b"\xff" * 8 + b"{}",
    "a list": with_header([1, 2]),
    "no offsets": with_header({"a": {}, "b": {}}),
    "offsets beyond the file": with_header({"a": {"data_offsets": [0, 2**62]}, "b": {}}),
    "negative offsets": with_header({"a": {"data_offsets": [-4, 4]}, "b": {}}),
    "offsets that are no numbers": with_header({"a": {"data_offsets": ["x", None]}, "b": {}}),
    "tensors that overlap": with_header(
        {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("a", "a2", "b")}
    ),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_manipulated_header_is_one_line(tmp_path: Path, data: bytes):
    store = Store(tmp_path, keep=None)
    path = store.save(Snapshot({"model": {"a": torch.ones(4)}}, {"step": 1}))
    (path / "model.safetensors").write_bytes(data)
    files = {name: (path / name).read_bytes() for name in ("model.safetensors", "state.json")}
    (path / "manifest.json").write_bytes(encode_manifest(files))
    with pytest.raises(CheckpointError, match="is not safetensors"):
        store.load(path, lambda part, name: name.startswith("a"))
