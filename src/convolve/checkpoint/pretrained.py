"""Initial weights from elsewhere: our checkpoints, and safetensors files of ours, torchvision's or timm's networks.

Every tensor must fit, by name and shape. The one exception is the classifier: where the number of classes differs, the
fresh one stays, which is what fine-tuning wants.

Names of parameters and blocks of other libraries, in ours.

Ours are torchvision's, and timm's ResNets have the same. timm's EfficientNets and MobileNets name a block by its stage
and its layers by their work (`blocks.2.0.conv_dw`), which is undone here. Wrappers leave a prefix (`module.`), which is
taken off.

Graphcore's TensorFlow application lets a pipeline stage begin at `b1/2` (later `stage1/unit3`), at the `relu` that ends
such a block, at `block2b` of an EfficientNet, and at some ends. A closing `relu` belongs to its block here, so the
stage begins at the block after it, which computes the same.
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
    """What was taken over, and the parameters that kept their fresh values."""

    source: Path
    taken: int
    fresh: tuple[str, ...]


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of a checkpoint, or of a run's best or newest checkpoint."""
    if path.is_dir():
        return load(choose_checkpoint(path)).tensors["model"]
    if not path.is_file():
        raise CheckpointError(f"init-path={path}: there is no such file or folder")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        with path.open("rb") as file:
            foreign = describe_mismatch(file.read(8), path.suffix.lower())
        if foreign:
            raise CheckpointError(
                f"init-path={path}: is {foreign}, and pickles can run code; make it safe first with: "
                f"convolve convert {path} {path.with_suffix('.safetensors')}"
            ) from None
        reason = " ".join(str(error).split())
        raise CheckpointError(f"init-path={path}: is not safetensors ({reason}); give another file") from None


def load_pretrained(network: Network, path: Path) -> LoadReport:
    """Put weights from a path into a network."""
    own = network.state_dict()
    weights = convert_state_dict(read_weights(path), own)
    head = head_names(network)
    _require_match(own, weights, head, path)
    taken = [name for name in own if name in weights and weights[name].numel() == own[name].numel()]
    with torch.no_grad():
        for name in taken:
            own[name].copy_(weights[name].reshape(own[name].shape))
    return LoadReport(path, len(taken), tuple(name for name in own if name in head and name not in taken))


def head_names(network: Network) -> frozenset[str]:
    """Names of the parameters of the last block that has any: the classifier."""
    for name, block in reversed(network.blocks.items()):
        found = frozenset(f"{name.replace('/', '.')}.{key}" for key in block.state_dict())
        if found:
            return found
    return frozenset()


def _require_match(own: dict[str, Tensor], weights: dict[str, Tensor], head: frozenset[str], path: Path) -> None:
    missing = [name for name in own if name not in weights and name not in head]
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    if missing:
        raise CheckpointError(
            f"init-path={path}: has no '{missing[0]}' ({len(missing)} of {len(own)} are missing); "
            "choose the --model that the file was made with"
        )
    surplus = sorted(set(weights) - set(own) - head)
    if surplus:
        raise CheckpointError(
            f"init-path={path}: has '{surplus[0]}', which the network has not ({len(surplus)} such); "
            "choose the --model that the file was made with"
        )
    for name, tensor in own.items():
        if name in weights and name not in head and tensor.numel() != weights[name].numel():
            raise CheckpointError(
                f"init-path={path}: '{name}' has shape {list(weights[name].shape)}, the network needs "
                f"{list(tensor.shape)}; only the classifier may differ"
            )


_BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.(.+)")
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")


def convert_state_dict(theirs: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names that a network has; names that nobody knows stay as they are."""
    plain = {_strip(name): tensor for name, tensor in theirs.items()}
    if "conv_stem.weight" not in plain:
        return plain
    names = _timm_names(plain, own)
    return {names.get(name, name): tensor for name, tensor in plain.items()}


def _strip(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _timm_names(theirs: Iterable[str], own: Mapping[str, Tensor]) -> dict[str, str]:
    blocks: dict[tuple[int, int], set[str]] = {}
    for name in theirs:
        if match := _BLOCK.fullmatch(name):
            blocks.setdefault((int(match[1]), int(match[2])), set()).add(match[3].rpartition(".")[0])
    layers = {"conv_stem": "features.0.0", "bn1": "features.0.1"}
    staged = any(re.match(r"features\.1\.0\.block", name) for name in own)
    for number, (stage, index) in enumerate(sorted(blocks), start=1):
        base = f"features.{stage + 1}.{index}" if staged else f"features.{number}"
        old = f"blocks.{stage}.{index}"
        layers.update({f"{old}.{one}": f"{base}.{other}" for one, other in _block(blocks[stage, index], base, own)})
    layers.update(_head(own))
    return {
        name: f"{layers[layer]}.{kind}"
        for name in theirs
        for layer, _, kind in [name.rpartition(".")]
        if layer in layers
    }


def _block(parts: set[str], base: str, own: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Pairs of timm's and our layer names inside one block."""
    if parts == {"conv", "bn1"}:
        return [("conv", "0"), ("bn1", "1")]
    pairs = [("conv_pw", "bn1"), ("conv_dw", "bn2")] if "conv_pwl" in parts else [("conv_dw", "bn1")]
    last = ("conv_pwl", "bn3") if "conv_pwl" in parts else ("conv_pw", "bn2")
    gate = "se.conv_reduce" in parts
    folder = "conv" if any(name.startswith(f"{base}.conv.") for name in own) else "block"
    found = [(one, f"{folder}.{at}.{kind}") for at, pair in enumerate(pairs) for kind, one in enumerate(pair)]
    at = len(pairs)
    if gate:
        found += [("se.conv_reduce", f"{folder}.{at}.fc1"), ("se.conv_expand", f"{folder}.{at}.fc2")]
        at += 1
    if folder == "conv":
        return [*found, (last[0], f"conv.{at}"), (last[1], f"conv.{at + 1}")]
    return [*found, (last[0], f"block.{at}.0"), (last[1], f"block.{at}.1")]


def _head(own: Mapping[str, Tensor]) -> dict[str, str]:
    if "classifier.3.weight" in own:
        return {"conv_head": "classifier.0", "classifier": "classifier.3"}
    top = max(int(name.split(".")[1]) for name in own if name.startswith("features."))
    return {"conv_head": f"features.{top}.0", "bn2": f"features.{top}.1", "classifier": "classifier.1"}
