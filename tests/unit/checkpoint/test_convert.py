"""A pickle is opened in a process of its own, with torch's restricted reader."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convolve.checkpoint import convert
from convolve.checkpoint.convert import find_tensors
from convolve.errors import CheckpointError, ConfigError

WEIGHTS = {"conv.weight": torch.arange(6.0).reshape(2, 3), "conv.bias": torch.ones(2)}


def test_a_state_dict_becomes_safetensors(tmp_path):
    torch.save({"epoch": 3, "state_dict": WEIGHTS}, tmp_path / "model.pth")
    report = convert.convert(tmp_path / "model.pth", tmp_path / "model.safetensors")
    assert report.tensors == 2
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
    with pytest.raises(ConfigError, match="already exists"):
        convert.convert(tmp_path / "model.pth", tmp_path / "model.safetensors")


def test_a_pickle_that_wants_to_run_code_is_refused_unrun(tmp_path):
    class Canary:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "canary",))

    (tmp_path / "bad.pth").write_bytes(pickle.dumps({"state_dict": Canary()}))
    with pytest.raises(CheckpointError, match="cannot read safely"):
        convert.convert(tmp_path / "bad.pth", tmp_path / "out.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.pth"]


@pytest.mark.parametrize("place", ["state_dict", "model_state_dict", "model", "state_dict_ema"])
def test_weights_are_found_where_scripts_keep_them(place):
    assert find_tensors({"epoch": 1, place: WEIGHTS}) == WEIGHTS


def test_a_file_without_weights_is_refused():
    with pytest.raises(ValueError, match="contains no dictionary of tensors"):
        find_tensors({"epoch": 3})
