"""A snapshot becomes files and comes back as it was."""

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch

from convolve.checkpoint.manifest import encode_manifest, read_manifest
from convolve.checkpoint.snapshot import PARTS, Snapshot, decode, encode
from convolve.checkpoint.store import Store, load
from convolve.errors import CheckpointError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
]


def round_trip(snapshot: Snapshot, folder: Path) -> Snapshot:
    return load(Store.open(folder, keep=None).save(snapshot))


def make_bytes(count: int) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.int64) * 37 % 251).to(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)], ids=["0-dim", "empty", "3-dim"])
def test_every_dtype_and_shape_is_restored_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    raw = make_bytes(math.prod(shape) * torch.empty(0, dtype=dtype).element_size())
    raw = raw % 2 if dtype is torch.bool else raw
    tensor = raw.view(dtype).reshape(shape)
    back = round_trip(Snapshot({"model": {"x": tensor}}, {"step": 1}), tmp_path).tensors["model"]["x"]
    assert back.dtype is dtype and back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_non_finite_values_and_negative_zero_are_restored(tmp_path: Path) -> None:
    tensor = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45])
    back = round_trip(Snapshot({"model": {"x": tensor}}, {"step": 1}), tmp_path).tensors["model"]["x"]
    assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))


def test_strided_shared_and_channels_last_tensors_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    tensors = {
        "base": base,
        "same": base,
        "turned": base.permute(3, 2, 1, 0),
        "last": base.contiguous(memory_format=torch.channels_last),
        "slice": base[:, 1:, ::2],
        "parameter": torch.nn.Parameter(base[0]),
    }
    back = round_trip(Snapshot({"model": tensors}, {"step": 1}), tmp_path).tensors["model"]
    assert list(sorted(back)) == sorted(tensors)
    assert all(torch.equal(back[name], tensors[name]) and not back[name].requires_grad for name in tensors)


def test_loaded_tensors_can_be_written_to(tmp_path: Path) -> None:
    back = round_trip(Snapshot({"model": {"x": torch.ones(3)}}, {"step": 1}), tmp_path).tensors["model"]["x"]
    assert back.add_(1).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "parts", [[], ["model"], ["model", "optimizer"], list(PARTS)], ids=lambda parts: "+".join(parts)
)
def test_absent_parts_are_not_written(parts: list[str], tmp_path: Path) -> None:
    tensors = {part: {f"{part}.x": torch.ones(2)} for part in parts}
    path = Store.open(tmp_path, keep=None).save(Snapshot(tensors, {"step": 1}))
    assert set(load(path).tensors) == set(parts)
    assert {file.name for file in path.iterdir()} == {"state.json", "manifest.json"} | {
        f"{part}.safetensors" for part in parts
    }


def test_state_is_restored_to_the_last_bit(tmp_path: Path) -> None:
    state = {
        "step": 7,
        "samples": 2**60,
        "rate": 0.1 + 0.2,
        "tiny": 5e-324,
        "names": ["null", "é", "\u0000", "日本"],
        "nested": {"a": [None, True, {"b": -0.0}]},
        "infinite": math.inf,
    }
    assert round_trip(Snapshot({}, state), tmp_path).state == state


def test_nan_in_the_state_survives(tmp_path: Path) -> None:
    assert math.isnan(round_trip(Snapshot({}, {"step": 1, "loss": math.nan}), tmp_path).state["loss"])


def test_equal_snapshots_give_equal_bytes_whatever_the_order_of_their_names() -> None:
    tensors = {f"layer{n}": torch.full((n + 1,), float(n)) for n in range(20)}
    turned = dict(reversed(tensors.items()))
    first = encode(Snapshot({"model": tensors}, {"step": 1, "a": 2}))
    second = encode(Snapshot({"model": turned}, {"a": 2, "step": 1}))
    assert first == second


def test_the_manifest_has_the_sha256_and_size_of_each_file(tmp_path: Path) -> None:
    path = Store.open(tmp_path, keep=None).save(Snapshot({"model": {"x": torch.ones(9)}}, {"step": 1}))
    for name, entry in read_manifest(path).items():
        data = (path / name).read_bytes()
        assert (entry.sha256, entry.size) == (hashlib.sha256(data).hexdigest(), len(data))


@pytest.mark.parametrize("step", [None, -1, True, 1.0, "1"], ids=repr)
def test_a_state_without_an_integer_step_is_rejected(step: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"step={step!r}"):
        Store.open(tmp_path, keep=None).save(Snapshot({}, {"step": step}))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"step": 1, "x": {3: 1}}, "state.x has the key 3"),
        ({"step": 1, "x": [{(1, 2): 1}]}, "keys must be strings"),
        ({"step": 1, "x": torch.ones(1)}, "cannot be stored as JSON"),
        ({"step": 1, "x": {1, 2}}, "cannot be stored as JSON"),
    ],
)
def test_a_state_that_json_cannot_hold_is_rejected(state: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words.replace("(", r"\(")):
        encode(Snapshot({}, state))


def test_an_unknown_part_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(CheckpointError, match="'optimiser'.*did you mean optimizer"):
        encode(Snapshot({"optimiser": {}}, {"step": 1}))


def test_a_tensor_that_safetensors_cannot_hold_is_rejected_in_one_line() -> None:
    with pytest.raises(CheckpointError, match="part 'model' cannot be stored") as caught:
        encode(Snapshot({"model": {"x": torch.ones(2, 2).to_sparse()}}, {"step": 1}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"step": -1}', b"{}"], ids=range(6))
def test_a_sealed_state_that_makes_no_sense_is_named(content: bytes, tmp_path: Path) -> None:
    write_sealed(tmp_path, {"state.json": content})
    with pytest.raises(CheckpointError, match="state.json"):
        load(tmp_path)


def test_a_sealed_part_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}).encode()
    bad = {
        "noise": b"\x00" * 40,
        "dtype": len(header).to_bytes(8, "little") + header + b"\0" * 4,
        "empty": b"",
        "huge": (2**60).to_bytes(8, "little") + b"{}",
    }
    for name, data in bad.items():
        folder = tmp_path / name
        folder.mkdir()
        write_sealed(folder, {"model.safetensors": data, "state.json": b'{"step": 1}'})
        with pytest.raises(CheckpointError, match="model.safetensors: is not safetensors") as caught:
            load(folder)
        assert "\n" not in str(caught.value)


def test_decode_needs_no_folder_on_the_disk() -> None:
    snapshot = Snapshot({"averages": {"x": torch.ones(2)}}, {"step": 3})
    assert decode(Path("nowhere"), encode(snapshot)).step == 3


def write_sealed(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "manifest.json").write_bytes(encode_manifest(files))
