"""Where to cut a list of blocks into pipeline stages.

A pipeline is as fast as its slowest stage, so the best cut makes the costliest stage as cheap as it can be. Stages are
contiguous, and so the exact answer is quick: with best(k, j) the least possible cost of the costliest of k stages over
the first j blocks,

    best(1, j) = cost(0, j)        best(k, j) = min over i of max(best(k - 1, i), cost(i, j))

where cost(i, j) adds up blocks i to j - 1, and is infinite where these blocks do not fit into a stage's memory.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from convolve.errors import ConfigError

Fits = Callable[[int, int, int], bool]
"""Whether stage number `s` can hold the blocks from `begin` up to, not including, `end`."""


def balance(costs: Sequence[float], stages: int, fits: Fits | None = None) -> list[int]:
    """Indices at which stages begin, the first always 0, so that the costliest stage is as cheap as possible.

    Among equally good cuts the one with the earliest last stages is taken. Every stage has at least one block.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise ConfigError(f"{stages} stages for {blocks} blocks: every stage needs a block; ask for 1 to {blocks}")
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] if fits is None or fits(stage, begin, end) else inf

    best = [inf, *(cost(0, 0, end) for end in range(1, blocks + 1))]
    choices: list[list[int]] = []
    for stage in range(1, stages):
        rows = [(inf, 0)] * (stage + 1) + [
            min((max(best[begin], cost(stage, begin, end)), begin) for begin in range(stage, end))
            for end in range(stage + 1, blocks + 1)
        ]
        best, choice = (list(column) for column in zip(*rows, strict=True))
        choices.append(choice)
    if best[blocks] == inf:
        raise ConfigError(
            f"{stages} stages for {blocks} blocks: no cut fits into the memory; take more stages, a smaller batch, or "
            "recomputation"
        )
    return _walk_back(choices, blocks)


def _walk_back(choices: Sequence[Sequence[int]], blocks: int) -> list[int]:
    begins, end = list[int](), blocks
    for row in reversed(choices):
        end = row[end]
        begins.append(end)
    return [0, *reversed(begins)]
