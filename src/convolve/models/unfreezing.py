"""Gradual unfreezing (Howard and Ruder 2018): train the classifier first, then one stage more after every interval.

A stage is a run of blocks such as layer4/0 and layer4/1, or one other block with trained parameters, so the last stage
is the classifier. After s samples with an interval of i samples, the last 1 + floor(s / i) stages are trained. This is
a function of the position, so a restored run continues with the same stages.

A frozen stage has no gradients and is in evaluation mode. Blocks and norms that are frozen for the whole run stay so.
"""

import math
import re
from itertools import groupby

from torch import nn

from convolve.models.network import Network

_STAGE = re.compile(r"(.*\d)/\d+")


def find_stages(model: Network) -> dict[str, list[nn.Module]]:
    """Return the blocks of each stage with trained parameters, the last stage first."""

    def stage(name: str) -> str:
        found = _STAGE.fullmatch(name)
        return found[1] if found else name

    trained = [name for name, block in model.blocks.items() if any(one.requires_grad for one in block.parameters())]
    groups = groupby(reversed(trained), stage)
    return {name: [model.blocks[block] for block in blocks] for name, blocks in groups}


class GradualUnfreezing:
    """Freezes stages of a model before a step, by the samples seen. `interval` is in samples."""

    def __init__(self, model: Network, interval: int) -> None:
        self._stages = [
            (blocks, [weight for block in blocks for weight in block.parameters() if weight.requires_grad])
            for blocks in find_stages(model).values()
        ]
        self._interval = max(1, interval)

    def __call__(self, samples: int) -> None:
        """Prepare the model for the step at a position; validation may have changed the mode of its blocks."""
        for number, (blocks, parameters) in enumerate(self._stages):
            trained = number <= samples // self._interval
            for block in blocks:
                block.train(trained)
            for parameter in parameters:
                parameter.requires_grad_(trained)


def explain_unfreezing(model: Network, interval: float, epochs: float) -> str:
    """Return a line about the stages of a run of some epochs, and those that it does not reach."""
    stages = list(find_stages(model))
    line = f"gradual unfreezing: {stages[0]} first, then one more of {len(stages)} stages every {interval:g} epochs"
    reached = math.ceil(epochs / interval)
    if reached >= len(stages):
        return line
    return f"{line}; the run ends before {stages[reached]} and earlier stages are trained"
