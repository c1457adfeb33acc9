"""Names of parameters and blocks of other libraries, in ours.

Ours are torchvision's, and timm's ResNets have the same. timm's EfficientNets and MobileNets name a block by its stage
and its layers by their work (`blocks.2.0.conv_dw`), which is undone here. Wrappers leave a prefix (`module.`), which is
taken off.

Graphcore's TensorFlow application lets a pipeline stage begin at `b1/2` (later `stage1/unit3`), at the `relu` that ends
such a block, at `block2b` of an EfficientNet, and at some ends. A closing `relu` belongs to its block here, so the
stage begins at the block after it, which computes the same.
"""

import re
from collections.abc import Iterable, Sequence

_SPLIT = re.compile(r"(?:b(\d)/(\d+)|stage(\d)/unit(\d+)|block(\d)([a-z]))(/relu)?")
_ENDS = {"reduce_mean": "avgpool", "fc1": "fc", "Top": "features/8"}


def canonical_splits(splits: Iterable[str], blocks: Sequence[str]) -> tuple[str, ...]:
    """Where pipeline stages begin, as names of a network's blocks; names that nobody knows stay as they are."""
    return tuple(split if split in blocks else _canonical_split(split, blocks) for split in splits)


def _canonical_split(split: str, blocks: Sequence[str]) -> str:
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
