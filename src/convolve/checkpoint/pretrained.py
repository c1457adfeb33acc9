"""Pretrained weights: checkpoints of other runs, and safetensors files of convolve, torchvision or timm.

Every tensor must match by name and shape. The exception is the classifier: if the number of classes differs, it stays
newly initialized, as fine-tuning requires.

Parameter names are torchvision's, which timm's ResNets share. timm's EfficientNets and MobileNets name a block by its
stage and a layer by its function (`blocks.2.0.conv_dw`); `convert_state_dict` renames them, and removes the prefixes of
wrappers, such as `module.`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from convolve.checkpoint.snapshot import describe_mismatch
from convolve.checkpoint.store import choose_checkpoint, load
from convolve.errors import CheckpointError
from convolve.models.network import Network


@dataclass(frozen=True)
class LoadReport:
    """Number of loaded tensors, and the names of those that stay newly initialized."""

    source: Path
    loaded: int
    new: tuple[str, ...]


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, a checkpoint, or the best or newest checkpoint of a run."""
    if path.is_dir():
        return load(choose_checkpoint(path)).trained().tensors["model"]
    if not path.is_file():
        raise CheckpointError(f"--init-path {path}: no such file or folder; give a safetensors file or a run")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        with path.open("rb") as file:
            mismatch = describe_mismatch(file.read(8), path.suffix.lower())
        if mismatch:
            raise CheckpointError(
                f"--init-path {path}: is {mismatch}, and pickles can run code; convert it first: "
                f"convolve convert {path} {path.with_suffix('.safetensors')}"
            ) from None
        reason = " ".join(str(error).split())
        raise CheckpointError(f"--init-path {path}: not a safetensors file ({reason}); give another file") from None


def load_pretrained(model: Network, path: Path) -> LoadReport:
    """Load weights from a path into a model."""
    expected = model.state_dict()
    weights = convert_state_dict(read_weights(path), expected)
    head = head_names(model)
    _require_match(expected, weights, head, path)
    loaded = [name for name in expected if name in weights and weights[name].numel() == expected[name].numel()]
    with torch.no_grad():
        for name in loaded:
            expected[name].copy_(weights[name].reshape(expected[name].shape))
    return LoadReport(path, len(loaded), tuple(name for name in expected if name in head and name not in loaded))


def head_names(model: Network) -> frozenset[str]:
    """Return the names of the classifier's tensors, which are those of the last block that has any."""
    for name, block in reversed(model.blocks.items()):
        names = frozenset(f"{name.replace('/', '.')}.{key}" for key in block.state_dict())
        if names:
            return names
    return frozenset()


def _require_match(expected: dict[str, Tensor], weights: dict[str, Tensor], head: frozenset[str], path: Path) -> None:
    remedy = "choose the --model that the file was made with"
    missing = [name for name in expected if name not in weights and name not in head]
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    if missing:
        raise CheckpointError(
            f"--init-path {path}: missing key '{missing[0]}' ({len(missing)} of {len(expected)} in total); {remedy}"
        )
    unexpected = sorted(set(weights) - set(expected) - head)
    if unexpected:
        raise CheckpointError(
            f"--init-path {path}: unexpected key '{unexpected[0]}' ({len(unexpected)} in total); {remedy}"
        )
    for name, tensor in expected.items():
        if name in weights and name not in head and tensor.numel() != weights[name].numel():
            raise CheckpointError(
                f"--init-path {path}: '{name}' has shape {list(weights[name].shape)}, the model needs "
                f"{list(tensor.shape)}; only the classifier may differ"
            )


_BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.(.+)")
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")


def convert_state_dict(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights of timm and of wrapped models to the names in `expected`; unknown names are kept."""
    plain = {_strip(name): tensor for name, tensor in weights.items()}
    if "conv_stem.weight" not in plain:
        return plain
    names = _timm_names(plain, expected)
    return {names.get(name, name): tensor for name, tensor in plain.items()}


def _strip(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _timm_names(timm: Iterable[str], expected: Mapping[str, Tensor]) -> dict[str, str]:
    blocks: dict[tuple[int, int], set[str]] = {}
    for name in timm:
        if match := _BLOCK.fullmatch(name):
            blocks.setdefault((int(match[1]), int(match[2])), set()).add(match[3].rpartition(".")[0])
    layers = {"conv_stem": "features.0.0", "bn1": "features.0.1"}
    staged = any(re.match(r"features\.1\.0\.block", name) for name in expected)
    for number, (stage, index) in enumerate(sorted(blocks), start=1):
        base = f"features.{stage + 1}.{index}" if staged else f"features.{number}"
        pairs = _block_layers(blocks[stage, index], base, expected)
        layers.update({f"blocks.{stage}.{index}.{layer}": f"{base}.{new_layer}" for layer, new_layer in pairs})
    layers.update(_head_layers(expected))
    return {
        name: f"{layers[layer]}.{kind}" for name in timm for layer, _, kind in [name.rpartition(".")] if layer in layers
    }


def _block_layers(layers: set[str], base: str, expected: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of timm's and convolve's layer names inside one block."""
    if layers == {"conv", "bn1"}:
        return [("conv", "0"), ("bn1", "1")]
    projects = "conv_pwl" in layers
    convs = [("conv_pw", "bn1"), ("conv_dw", "bn2")] if projects else [("conv_dw", "bn1")]
    last_conv, last_norm = ("conv_pwl", "bn3") if projects else ("conv_pw", "bn2")
    module = "conv" if any(name.startswith(f"{base}.conv.") for name in expected) else "block"
    pairs = [(layer, f"{module}.{at}.{kind}") for at, pair in enumerate(convs) for kind, layer in enumerate(pair)]
    at = len(convs)
    if "se.conv_reduce" in layers:
        pairs += [("se.conv_reduce", f"{module}.{at}.fc1"), ("se.conv_expand", f"{module}.{at}.fc2")]
        at += 1
    if module == "conv":
        return [*pairs, (last_conv, f"conv.{at}"), (last_norm, f"conv.{at + 1}")]
    return [*pairs, (last_conv, f"block.{at}.0"), (last_norm, f"block.{at}.1")]


def _head_layers(expected: Mapping[str, Tensor]) -> dict[str, str]:
    if "classifier.3.weight" in expected:
        return {"conv_head": "classifier.0", "classifier": "classifier.3"}
    top = max(int(name.split(".")[1]) for name in expected if name.startswith("features."))
    return {"conv_head": f"features.{top}.0", "bn2": f"features.{top}.1", "classifier": "classifier.1"}
