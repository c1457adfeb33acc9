"""Whether somebody looks at a module, so that it must not be passed over by code that does several at once."""

from torch import nn


def is_watched(module: nn.Module) -> bool:
    """Whether somebody looks at what goes into a module or comes out of it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
