"""Forward hooks of modules: an operation that skips a module must not skip its hooks."""

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at what goes into a module or comes out of it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
