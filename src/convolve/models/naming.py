"""Names of parameters and blocks of other libraries, in ours.

Ours are torchvision's, and timm's ResNets have the same. timm's EfficientNets and MobileNets name a block by its stage
and its layers by their work (`blocks.2.0.conv_dw`), which is undone here. Wrappers leave a prefix (`module.`), which is
taken off.

Graphcore's TensorFlow application lets a pipeline stage begin at `b1/2` (later `stage1/unit3`), at the `relu` that ends
such a block, at `block2b` of an EfficientNet, and at some ends. A closing `relu` belongs to its block here, so the
stage begins at the block after it, which computes the same.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

_BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.(.+)")
_SPLIT = re.compile(r"(?:b(\d)/(\d+)|stage(\d)/unit(\d+)|block(\d)([a-z]))(/relu)?")
_ENDS = {"reduce_mean": "avgpool", "fc1": "fc", "Top": "features/8"}
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")


def to_own_names(theirs: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names that a network has; names that nobody knows stay as they are."""
    plain = {_strip(name): tensor for name, tensor in theirs.items()}
    if "conv_stem.weight" not in plain:
        return plain
    names = _timm_names(plain, own)
    return {names.get(name, name): tensor for name, tensor in plain.items()}


def to_own_splits(splits: Iterable[str], blocks: Sequence[str]) -> tuple[str, ...]:
    """Where pipeline stages begin, as names of a network's blocks; names that nobody knows stay as they are."""
    return tuple(split if split in blocks else _own_split(split, blocks) for split in splits)


def _own_split(split: str, blocks: Sequence[str]) -> str:
    match = _SPLIT.fullmatch(split)
    if match is None:
        own = _ENDS.get(split, split)
    elif match[5]:
        own = f"features/{match[5]}/{ord(match[6]) - ord('a')}"
    else:
        own = f"layer{match[1]}/{match[2]}" if match[1] else f"layer{match[3]}/{int(match[4]) - 1}"
    if own not in blocks:
        return split
    return blocks[blocks.index(own) + 1] if match and match[7] else own


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
