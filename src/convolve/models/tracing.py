"""Run a module once without values, to check its output and to find the chain of blocks that it consists of.

A chain is a module whose forward pass applies its children one after the other and does nothing else: `nn.Sequential`,
and any other module of which that is observed. It can be split into pipeline stages. Each child must be called once,
with the output of the one before, unchanged; between two children, flattening everything but the batch is allowed. A
child that is itself a chain of many layers or of composite blocks is replaced by its children.

The module runs in training and in evaluation, on torch's meta device if it supports that. Both must show one chain.
"""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from convolve import rng
from convolve.errors import ConfigError, describe
from convolve.layers.generators import keyed_generators

SAMPLES = 2
MAX_LAYERS = 3
"""A block of more plain layers than this is split into them: conv, norm and activation stay together."""
FLATTEN = "flatten"


@dataclass
class _Call:
    """One call of a module, and the calls inside it. Versions detect changes in place between calls."""

    name: str
    single: bool
    input: Tensor | None
    input_version: int
    output: Any = None
    output_version: int = 0
    calls: list["_Call"] = field(default_factory=list)


@dataclass(frozen=True)
class TracedModule:
    """Output shape of one sample, and the names of the blocks of the chain, empty if the module is none.

    `FLATTEN` among the names stands for flattening between two children.
    """

    output_shape: tuple[int, ...]
    chain: tuple[str, ...]


def trace_module(subject: str, module: nn.Module, input_shape: tuple[int, ...]) -> TracedModule:
    """Run a copy of a module on images of this shape; an error starts with `subject`."""
    try:
        copy = deepcopy(module)
    except Exception as error:
        raise ConfigError(
            f"{subject}: cannot be copied ({describe(error)}); keep what resists out of the module"
        ) from error
    try:
        calls = [_run(copy.to("meta").train(mode), input_shape, "meta") for mode in (True, False)]
    except Exception:
        copy = deepcopy(module)
        device = next(module.parameters(), torch.empty(0)).device
        try:
            calls = [_run(copy.train(mode), input_shape, device) for mode in (True, False)]
        except Exception as error:
            shape = "x".join(map(str, input_shape))
            raise ConfigError(f"{subject}: fails on {shape} images ({describe(error)}); fix the module") from error
    for call in calls:
        if not isinstance(call.output, Tensor):
            kind = type(call.output).__name__
            raise ConfigError(f"{subject}: returns {kind}; return one tensor of logits [N, classes]")
        if call.output.shape[:1] != (SAMPLES,):
            returned = list(call.output.shape)
            raise ConfigError(f"{subject}: returns shape {returned} for {SAMPLES} images; return logits [N, classes]")
    chains = {_expand(call, module, _count_calls(call)) for call in calls}
    chain = chains.pop() if len(chains) == 1 else ()
    return TracedModule(tuple(calls[0].output.shape[1:]), chain or ())


def _run(module: nn.Module, input_shape: tuple[int, ...], device: torch.device | str) -> _Call:
    """Run a module and return its call with all calls inside."""
    target = torch.device(device)
    with keyed_generators("trace", device=target):
        x = torch.empty(SAMPLES, *input_shape, device=target).uniform_()
    root = _Call("", True, x, x._version)
    stack, handles = [root], []
    for name, child in module.named_modules():
        if child is not module:
            handles.append(child.register_forward_pre_hook(partial(_enter, stack, name), with_kwargs=True))
            handles.append(child.register_forward_hook(partial(_leave, stack), always_call=True))
    try:
        with torch.no_grad(), rng.at(0, 0, 0), keyed_generators("trace", device=target):
            root.output = module(x)
    finally:
        for handle in handles:
            handle.remove()
    root.output_version = root.output._version if isinstance(root.output, Tensor) else 0
    return root


def _enter(stack: list[_Call], name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    single = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
    call = _Call(name, single, args[0] if single else None, args[0]._version if single else 0)
    stack[-1].calls.append(call)
    stack.append(call)


def _leave(stack: list[_Call], module: nn.Module, args: Any, output: Any) -> None:
    call = stack.pop()
    call.output = output
    call.output_version = output._version if isinstance(output, Tensor) else 0


def _count_calls(call: _Call) -> Counter[str]:
    counts = Counter([call.name])
    for inner in call.calls:
        counts += _count_calls(inner)
    return counts


def _expand(call: _Call, module: nn.Module, counts: Counter[str]) -> tuple[str, ...] | None:
    """Return the names of the blocks of a call that is a chain, or None."""
    x, version = call.input, call.input_version
    names: list[str] = []
    for inner in call.calls:
        if not inner.single or counts[inner.name] > 1 or not isinstance(inner.output, Tensor):
            return None
        if inner.input is not x:
            if not _is_flattened(inner.input, x):
                return None
            names.append(FLATTEN)
        if inner.input_version != version:
            return None
        names += _expand_child(inner, module, counts)
        x, version = inner.output, inner.output_version
    complete = bool(call.calls) and call.output is x and call.output_version == version
    return tuple(names) if complete and names.count(FLATTEN) <= 1 else None


def _expand_child(call: _Call, module: nn.Module, counts: Counter[str]) -> tuple[str, ...]:
    """Return the blocks of a child: those inside if it is a long chain, else itself."""
    child = module.get_submodule(call.name)
    layers = list(child.children())
    if len(layers) <= MAX_LAYERS and not any(list(layer.children()) for layer in layers):
        return (call.name,)
    inner = _expand(call, module, counts)
    return inner if inner and FLATTEN not in inner else (call.name,)


def _is_flattened(x: Tensor | None, source: Tensor | None) -> bool:
    """Return whether a tensor is its source, flattened behind the batch."""
    return (
        x is not None
        and source is not None
        and x.shape == source.flatten(1).shape
        and x.untyped_storage()._cdata == source.untyped_storage()._cdata
    )
