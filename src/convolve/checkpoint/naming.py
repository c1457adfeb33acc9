"""Parameter names of other libraries, and their names here.

Names here are torchvision's, which timm's ResNets share. timm's EfficientNets and MobileNets name a block by its stage
and a layer by its function (`blocks.2.0.conv_dw`). Ports from TensorFlow count the blocks of all stages and start names
with an underscore (`_blocks.4._depthwise_conv`). `convert_state_dict` renames both, and removes the prefixes of
wrappers, such as `module.`.
"""

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

_BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.(.+)")
_PORT_BLOCK = re.compile(r"_blocks\.(\d+)\.(.+)")
_TARGET_BLOCK = re.compile(r"features\.(\d+)\.(\d+)\.block\.")
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")

# Layers of a TensorFlow port in timm's words: outside blocks, and in blocks without and with an expansion.
_PORT_LAYERS = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_PORT_GATE = {"_se_reduce": "se.conv_reduce", "_se_expand": "se.conv_expand"}
_PORT_FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2", **_PORT_GATE}
_PORT_LATER = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
    **_PORT_GATE,
}


def convert_state_dict(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights of other libraries and of wrapped models to the names in `expected`; unknown names are kept."""
    plain = {strip_prefixes(name): tensor for name, tensor in weights.items()}
    if "_conv_stem.weight" in plain:
        plain = _port_to_timm(plain, expected)
    if "conv_stem.weight" not in plain or "features.0.0.weight" not in expected:
        return plain
    names = _timm_names(plain, expected)
    if names.get("conv_head.weight") == "classifier.0.weight":
        # MobileNet v3: a 1x1 convolution after the pooling in timm, a linear layer here.
        plain["conv_head.weight"] = plain["conv_head.weight"].flatten(1)
    return {names.get(name, name): tensor for name, tensor in plain.items()}


def strip_prefixes(name: str) -> str:
    """Return a parameter name without the prefixes that wrappers add."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _port_to_timm(plain: Mapping[str, Tensor], expected: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of a TensorFlow port under timm's names, with the stages of the model in `expected`."""
    found = {(int(match[1]), int(match[2])) for name in expected if (match := _TARGET_BLOCK.match(name))}
    stages = sorted(found)
    expanding = {match[1] for name in plain if (match := _PORT_BLOCK.match(name)) and match[2].startswith("_expand")}
    renamed = {}
    for name, tensor in plain.items():
        layer, _, kind = name.rpartition(".")
        match = _PORT_BLOCK.fullmatch(layer)
        if match and int(match[1]) < len(stages):
            stage, index = stages[int(match[1])]
            layers = _PORT_LATER if match[1] in expanding else _PORT_FIRST
            layer = f"blocks.{stage - 1}.{index}.{layers.get(match[2], match[2])}"
        renamed[f"{_PORT_LAYERS.get(layer, layer)}.{kind}"] = tensor
    return renamed


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


def _block_layers(layers: set[str], base: str, expected: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return pairs of timm's and convolve's layer names inside one block."""
    if layers == {"conv", "bn1"}:
        return [("conv", "0"), ("bn1", "1")]
    projects = "conv_pwl" in layers
    convs = [("conv_pw", "bn1"), ("conv_dw", "bn2")] if projects else [("conv_dw", "bn1")]
    last_conv, last_norm = ("conv_pwl", "bn3") if projects else ("conv_pw", "bn2")
    module = "conv" if any(name.startswith(f"{base}.conv.") for name in expected) else "block"
    pairs = [(layer, f"{module}.{at}.{kind}") for at, pair in enumerate(convs) for kind, layer in enumerate(pair)]
    at = len(convs)
    if module == "conv":
        return [*pairs, (last_conv, f"conv.{at}"), (last_norm, f"conv.{at + 1}")]
    if "se.conv_reduce" in layers:
        pairs += [("se.conv_reduce", f"block.{at}.fc1"), ("se.conv_expand", f"block.{at}.fc2")]
        at += 1
    elif f"{base}.block.{at}.0.weight" not in expected:
        at += 1  # EfficientNet without squeeze and excitation has an empty gate
    return [*pairs, (last_conv, f"block.{at}.0"), (last_norm, f"block.{at}.1")]


def _head_layers(expected: Mapping[str, Tensor]) -> dict[str, str]:
    if "classifier.3.weight" in expected:
        return {"conv_head": "classifier.0", "classifier": "classifier.3"}
    top = max(int(name.split(".")[1]) for name in expected if name.startswith("features."))
    return {"conv_head": f"features.{top}.0", "bn2": f"features.{top}.1", "classifier": "classifier.1"}
