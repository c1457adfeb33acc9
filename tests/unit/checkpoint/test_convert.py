"""A pickle is opened in a sandbox, with torch's restricted unpickler."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convolve.checkpoint import convert
from convolve.checkpoint.convert import find_tensors
from convolve.errors import CheckpointError, ConfigError, SandboxError

WEIGHTS = {"conv.weight": torch.arange(6.0).reshape(2, 3), "conv.bias": torch.ones(2)}


def test_a_state_dict_becomes_safetensors(tmp_path):
    torch.save({"epoch": 3, "state_dict": WEIGHTS}, tmp_path / "model.pth")
    report = convert.convert(tmp_path / "model.pth", tmp_path / "model.safetensors")
    assert report.tensors == 2
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
    with pytest.raises(ConfigError, match="already exists"):
        convert.convert(tmp_path / "model.pth", tmp_path / "model.safetensors")


def test_a_pickle_that_would_run_code_is_rejected_and_does_not_run(tmp_path):
    class Canary:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "canary",))

    torch.save({"state_dict": Canary()}, tmp_path / "bad.pth")
    # The unpickler names the class that it does not load. If it ran the code, only the sandbox would stop that.
    with pytest.raises(CheckpointError, match="cannot read safely .it contains .*, not only tensors") as caught:
        convert.convert(tmp_path / "bad.pth", tmp_path / "out.safetensors")
    assert "weights_only" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.pth"]


@pytest.mark.parametrize("place", ["state_dict", "model_state_dict", "model", "state_dict_ema"])
def test_weights_are_found_under_the_keys_of_training_scripts(place):
    assert find_tensors({"epoch": 1, place: WEIGHTS}) == WEIGHTS


def test_a_file_without_weights_is_rejected():
    with pytest.raises(SandboxError, match="contains no dictionary of tensors"):
        find_tensors({"epoch": 3})


def test_a_kilobyte_does_not_become_gigabytes(tmp_path):
    repeated = {f"layer{number}": torch.zeros(1).expand(10_000_000) for number in range(40)}
    torch.save(repeated, tmp_path / "bomb.pth")
    assert (tmp_path / "bomb.pth").stat().st_size < 20_000
    with pytest.raises(CheckpointError, match="many times the size of the file"):
        convert.convert(tmp_path / "bomb.pth", tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["bomb.pth"]


@pytest.mark.parametrize("content", [b"", b"not a pickle", bytes(1000), b"PK\x03\x04" + bytes(500)])
def test_garbage_is_rejected_in_one_line(tmp_path, content):
    (tmp_path / "bad.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot read safely \(it is damaged"):
        convert.convert(tmp_path / "bad.pth", tmp_path / "out.safetensors")


def test_code_beside_the_file_is_not_imported(tmp_path, monkeypatch):
    for name in ("json", "torch", "safetensors"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    torch.save(WEIGHTS, tmp_path / "model.pth")
    monkeypatch.chdir(tmp_path)
    assert convert.convert(tmp_path / "model.pth", tmp_path / "model.safetensors").tensors == 2
    assert not (tmp_path / "mark").exists()
