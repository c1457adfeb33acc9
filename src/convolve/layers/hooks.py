"""Observers of a model: the hooks on its modules, and operations that no observer may touch."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

_in_bookkeeping: ContextVar[bool] = ContextVar("in_bookkeeping", default=False)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks, which a fused operation would skip."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


@contextmanager
def bookkeeping() -> Iterator[None]:
    """Mark operations that are no arithmetic of the model, such as drawing random numbers.

    The contract with a dispatch mode that changes or records results (numerics/emulator.py): it runs an operation as is
    while `in_bookkeeping()` is true.
    """
    token = _in_bookkeeping.set(True)
    try:
        yield
    finally:
        _in_bookkeeping.reset(token)


def in_bookkeeping() -> bool:
    """Return whether the current operation is inside `bookkeeping`."""
    return _in_bookkeeping.get()
