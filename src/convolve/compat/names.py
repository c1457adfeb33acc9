"""Pipeline split names of Graphcore's TensorFlow application.

Its stages can start at `b1/2` (later `stage1/unit3`), at the `relu` that ends such a block, at `block2b` of an
EfficientNet, and at some layers near the output. Here a final `relu` is part of its block, so the stage starts at the
next block, which computes the same.
"""

import re
from collections.abc import Iterable, Sequence

_SPLIT = re.compile(r"(?:b(\d)/(\d+)|stage(\d)/unit(\d+)|block(\d)([a-z]))(/relu)?")
_ENDS = {"reduce_mean": "avgpool", "fc1": "fc", "Top": "features/8"}


def canonical_splits(splits: Iterable[str], blocks: Sequence[str]) -> tuple[str, ...]:
    """Translate split names to block names. Unknown names are returned unchanged."""
    return tuple(split if split in blocks else _canonical_split(split, blocks) for split in splits)


def _canonical_split(split: str, blocks: Sequence[str]) -> str:
    match = _SPLIT.fullmatch(split)
    if match is None:
        block = _ENDS.get(split, split)
    elif match[5]:
        block = f"features/{match[5]}/{ord(match[6]) - ord('a')}"
    else:
        block = f"layer{match[1]}/{match[2]}" if match[1] else f"layer{match[3]}/{int(match[4]) - 1}"
    if block not in blocks:
        return split
    return blocks[blocks.index(block) + 1] if match and match[7] else block
