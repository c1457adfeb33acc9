"""Modules that run one after the other, of which one may compute the next ones as well.

A native layer (`layers/native.py`) can compute itself and the modules after it in one pass. It does so only inside
`run_chain`, which knows the order, and only if none of these modules has hooks: a hook must see its module run. Called
as a module, every layer computes itself only, so a model stays correct in any other container.
"""

from collections.abc import Sequence

from torch import Tensor, nn


class FusingLayer:
    """Base of layers that can compute modules after them."""

    def fuse(self, following: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, int] | None:
        """Return the output after some of the `following` modules and their number; None if that is impossible."""
        raise NotImplementedError


def run_chain(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Apply modules in order, fused where a layer can fuse."""
    following = list(modules)
    while following:
        module = following.pop(0)
        fused = module.fuse(following, x) if isinstance(module, FusingLayer) else None
        if fused is None:
            x = module(x)
        else:
            x, count = fused
            del following[:count]
    return x
