"""Block names of Graphcore's applications.

Stages of the TensorFlow application can start at `b1/2` (later `stage1/unit3`), at the `relu` that ends such a block,
at `block2b` of an EfficientNet, and at some layers near the output. Here a final `relu` is part of its block, so the
stage starts at the next block, which computes the same.

The PyTorch application names modules: `layer2/3` as here, `blocks/3/0` (EfficientNet, stages from 0), `_blocks/9`
(counted over all stages, until v2.1), `mb_block/7` (MobileNet) and `add/3` (the residual sums of a ResNet).
"""

import re
from collections.abc import Iterable, Sequence

from convolve.errors import ConfigError

_SPLIT = re.compile(r"(?:b(\d)/(\d+)|stage(\d)/unit(\d+)|block(\d)([a-z]))(/relu)?")
_MODULE = re.compile(r"(blocks|_blocks|mb_block|add)((?:/\d+)*)")
_ENDS = {"reduce_mean": "avgpool", "fc1": "fc", "Top": "features/8"}


def canonical_splits(splits: Iterable[str], blocks: Sequence[str]) -> tuple[str, ...]:
    """Translate split names to block names. Unknown names are returned unchanged."""
    return tuple(split if split in blocks else _canonical_split(split, blocks) for split in splits)


def _canonical_split(split: str, blocks: Sequence[str]) -> str:
    module = _MODULE.fullmatch(split)
    if module is not None:
        return _canonical_module(module, blocks) or split
    match = _SPLIT.fullmatch(split)
    block = _ENDS.get(split, split) if match is None else _block_of(match)
    if block not in blocks:
        return split
    return blocks[blocks.index(block) + 1] if match and match[7] else block


def _block_of(match: re.Match[str]) -> str:
    if match[5]:
        return f"features/{match[5]}/{ord(match[6]) - ord('a')}"
    return f"layer{match[1]}/{match[2]}" if match[1] else f"layer{match[3]}/{int(match[4]) - 1}"


def _canonical_module(match: re.Match[str], blocks: Sequence[str]) -> str | None:
    """Return the block of a module of the PyTorch application, None if the model does not have it."""
    kind, places = match[1], [int(place) for place in match[2].split("/")[1:]]
    if kind == "blocks" and len(places) == 2:
        found = f"features/{places[0] + 1}/{places[1]}"
        return found if found in blocks else None
    pattern = {"mb_block": r"features/\d+", "_blocks": r"features/\d+/\d+", "add": r"layer\d+/\d+"}.get(kind, "")
    flat = [block for block in blocks if re.fullmatch(pattern, block)]
    place = places[0] if places else 0
    place += kind == "mb_block"
    return flat[place] if len(places) <= 1 and place < len(flat) else None


def canonical_checkpoints(patterns: Iterable[str], blocks: Sequence[str]) -> tuple[str, ...]:
    """Translate the residual sums (`add/3`) among the points of recomputation; other patterns are unchanged."""
    return tuple(
        (_canonical_module(match, blocks) or pattern) if (match := _MODULE.fullmatch(pattern)) else pattern
        for pattern in patterns
    )


def ending_block(split: str) -> str:
    """Return the block that ends where a stage would start, such as `layer1/0` for `b1/0/relu`."""
    match = _SPLIT.fullmatch(split)
    if match is None or not match[7]:
        raise ConfigError(
            f"--pipeline-splits {split}: with one stage, a split is a point of recomputation; name the end of a block, "
            "such as b1/0/relu, or use --recompute-checkpoints layer1/0"
        )
    return _block_of(match)
