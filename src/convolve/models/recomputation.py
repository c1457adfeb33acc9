"""Activations that are computed again instead of kept.

Of a segment of blocks only the input is kept; when the backward pass arrives, the segment runs once more and leaves
what that pass needs. The second run must be the first one again, bit for bit, and must leave no trace: random layers
are told the position that they were at, and batch norms do not count the samples a second time.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convolve.models.batch_norm import BatchNorm2d
from convolve.models.chance import Chance


def run_recomputed(run: Callable[[Tensor], Tensor], blocks: list[nn.Module], x: Tensor, chance: Chance) -> Tensor:
    """Run some blocks, keeping nothing but their input for the backward pass."""
    output = checkpoint(
        run, x, use_reentrant=False, preserve_rng_state=False, context_fn=_remember_position(blocks, chance)
    )
    assert isinstance(output, Tensor), "blocks give tensors"
    return output


Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]


def _remember_position(blocks: list[nn.Module], chance: Chance) -> Contexts:
    """Contexts for the first run and for the second; both see the position of the first."""
    position = chance.position

    @contextmanager
    def again() -> Iterator[None]:
        norms = [module for block in blocks for module in block.modules() if isinstance(module, BatchNorm2d)]
        now, chance.position = chance.position, position
        for norm in norms:
            norm.counting = False
        try:
            yield
        finally:
            chance.position = now
            for norm in norms:
                norm.counting = True

    return lambda: (nullcontext(), again())
