"""Blocks that belong together: a convolution with its 2x2 max-pool and ReLU, which native code does at once.

Nothing parts them, neither a pipeline stage nor an activation that is kept, and whether native code is there or not: so
a network has the same bits however it is cut.
"""

from collections.abc import Mapping

from torch import nn

Trio = tuple[str, str, str]


def find_trios(blocks: Mapping[str, nn.Module]) -> list[Trio]:
    """The names of such blocks, in order."""
    names = list(blocks)
    return [
        trio
        for trio in zip(names, names[1:], names[2:], strict=False)
        if _belong_together(*(blocks[name] for name in trio))
    ]


def as_pair(value: object) -> tuple[int, int]:
    """Height and width of a layer's setting that may be one number for both."""
    if isinstance(value, int):
        return value, value
    assert isinstance(value, tuple) and len(value) == 2, "settings of torch's layers are numbers or pairs"
    return value


def _belong_together(conv: nn.Module, pool: nn.Module, act: nn.Module) -> bool:
    return _is_plain_convolution(conv) and _halves(pool) and type(act) is nn.ReLU


def _is_plain_convolution(conv: nn.Module) -> bool:
    return (
        isinstance(conv, nn.Conv2d)
        and conv.stride == (1, 1)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
    )


def _halves(pool: nn.Module) -> bool:
    return (
        type(pool) is nn.MaxPool2d
        and as_pair(pool.kernel_size) == as_pair(pool.stride) == (2, 2)
        and as_pair(pool.padding) == (0, 0)
        and as_pair(pool.dilation) == (1, 1)
        and not pool.return_indices
    )
