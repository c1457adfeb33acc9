"""Checkpoints of several processes: each writes the tensors that it owns, and reads those that it holds."""

import json
import os
import socket
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import convolve
from convolve.checkpoint.store import Store, choose_checkpoint, load
from convolve.engine.callbacks import SaveCallback
from convolve.runs import session
from convolve.runs.changes import Changes
from digit_runs import digits_config, weights_hash
from process_runs import Job, restore_together, train_together

pytestmark = pytest.mark.dist
GIVEN = {"epochs": None, "iterations": 6, "batch_size": 16, "optimizer": "adam", "ema_decay": 0.9, "report": False}
SHARDED = {"replicas": 3, "rts": True}
STAGES = {"shards": 2}
BOTH = {"replicas": 2, "shards": 2, "rts": True}
LAYOUTS = pytest.mark.parametrize("layout", [SHARDED, STAGES, BOTH], ids=["sharded", "stages", "both"])
MESSAGES = 20_000  # bytes of names, sizes, sha256 and agreements
OTHER_FILES = 100_000  # bytes of headers, manifest and state, read more than once


def received_bytes():
    """Return the bytes that the open TCP connections of this process have received."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("Q", info, 128)[0]
        except OSError:
            continue
    return total


def train_measured(config, console):
    """Train, and write how many bytes rank 0 received during each save."""
    original, received = SaveCallback._save, []

    def save(callback, event):
        before = received_bytes()
        original(callback, event)
        callback.saver.poll(wait=True)
        received.append(received_bytes() - before)
        callback.parts.collectives.any_rank(False)

    SaveCallback._save = save
    report = session.train(config, console)
    if os.environ["RANK"] == "0":
        Path(config.run.run_dir, "received.json").write_text(json.dumps(received))
    return report


def size_of(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


@LAYOUTS
def test_a_save_sends_no_tensor_to_rank_zero(tmp_path, layout):
    config = digits_config(tmp_path, **GIVEN, **layout)
    Job(config.parallel, train_measured, config).finish()
    received = json.loads((tmp_path / "received.json").read_text())
    assert received and max(received) < MESSAGES, received
    assert size_of(load(choose_checkpoint(tmp_path)).tensors["optimizer"]) > 10 * MESSAGES


def read_measured(config, console):
    """Restore a run, and write how many bytes this process read of its checkpoint and how many its tensors have."""
    original, rank = Store.newest, os.environ["RANK"]

    def read_count():
        return int(Path("/proc/self/io").read_text().split()[1])

    def newest(store, announce, wants):
        before = read_count()
        path, snapshot = original(store, announce, wants)
        figures = {"read": read_count() - before, "held": sum(map(size_of, snapshot.tensors.values()))}
        Path(config.run.run_dir, f"read-{rank}.json").write_text(json.dumps(figures))
        return path, snapshot

    Store.newest = newest
    return session.resume(Path(config.run.run_dir), console, Changes(iterations=8))


@LAYOUTS
def test_a_restore_reads_a_checkpoint_once_per_host_and_elsewhere_only_the_tensors_of_a_process(tmp_path, layout):
    splits = ["fc2"] if "shards" in layout else ["auto"]
    config = digits_config(tmp_path, **GIVEN, **layout, pipeline_splits=splits)
    train_together(config)
    whole = sum(map(size_of, load(choose_checkpoint(tmp_path)).tensors.values()))
    Job(config.parallel, read_measured, config).finish()
    first, *others = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("read-*.json"))]
    assert whole < first["read"] < whole + first["held"] + OTHER_FILES, "compared with the manifest, then read"
    assert len(others) == config.parallel.replicas * config.parallel.shards - 1
    assert all(other["read"] < other["held"] + OTHER_FILES for other in others)
    assert min(other["held"] for other in others) + OTHER_FILES < whole


def test_checkpoints_of_any_layout_have_the_same_weights_for_any_reader(tmp_path):
    given = {**GIVEN, "gradient_accumulation_count": 4}
    train_together(digits_config(tmp_path / "alone", **given))
    split = {**given, "gradient_accumulation_count": 2}
    train_together(digits_config(tmp_path / "both", **split, **BOTH))
    alone, both = (choose_checkpoint(tmp_path / name) for name in ("alone", "both"))
    assert sorted(path.name for path in alone.glob("*.safetensors")) == [
        "averages.safetensors",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    counts = {part: len(list(both.glob(f"{part}-*.safetensors"))) for part in ("model", "averages", "optimizer")}
    assert counts == {"model": 2, "averages": 2, "optimizer": 4}
    assert weights_hash(tmp_path / "both") == weights_hash(tmp_path / "alone")
    first, other = convolve.open(tmp_path / "alone"), convolve.open(tmp_path / "both")
    assert first.validate().loss == other.validate().loss
    one, two = (load_file(run.export("safetensors").path) for run in (first, other))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_with_sharded_state_and_stages_continues_in_any_layout(tmp_path):
    given = {**GIVEN, "gradient_accumulation_count": 4}
    train_together(digits_config(tmp_path / "alone", **given | {"iterations": 12}))
    moved = tmp_path / "moved"
    train_together(digits_config(moved, **given | BOTH | {"gradient_accumulation_count": 2, "iterations": 4}))
    for iterations, layout in ((6, {"replicas": 3, "shards": 1}), (8, {"replicas": 1, "shards": 1}), (10, BOTH)):
        restore_together(moved, Changes(iterations=iterations, parallel=layout))
    restore_together(moved, Changes(iterations=12, parallel={"replicas": 1, "shards": 2}))
    assert weights_hash(moved) == weights_hash(tmp_path / "alone")
