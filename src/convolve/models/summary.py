"""Summarize a model: shape, parameters, multiply-adds and memory of each block, as a table or an SVG.

The arithmetic: the model runs twice on torch's meta device, which has shapes and no values, with 2 samples and with 3.
The difference is the cost of one sample.

Multiply-adds are those of convolutions and matrix products, half of the operations that torch counts; norms, pools and
activations count as none. Activation bytes are what training saves for the backward pass, in float32; each tensor is
counted once, at the first block that saves it.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from convolve import rng
from convolve.layers.batch_norm import BatchNorm2d
from convolve.layers.dropout import KeyedDropout
from convolve.models.network import Network, Shape


@dataclass(frozen=True)
class LayerRow:
    """One block. Shape, multiply-adds and activation bytes are for one sample."""

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    multiply_adds: int
    activation_bytes: int


@dataclass(frozen=True)
class ModelSummary:
    """One row for each block, and the totals."""

    name: str
    input_shape: Shape
    rows: tuple[LayerRow, ...]
    blocks: int
    parameters: int
    multiply_adds: int
    activation_bytes: int


def summarize(name: str, model: Network) -> ModelSummary:
    """Summarize a model without changing it."""
    copy = deepcopy(model).to("meta").train()
    costs = zip(copy.blocks.items(), _trace(copy, samples=2), _trace(copy, samples=3), strict=True)
    rows = tuple(
        LayerRow(
            name=block_name,
            kind=name_kind(block),
            shape=two.shape,
            parameters=sum(parameter.numel() for parameter in block.parameters()),
            multiply_adds=(three.operations - two.operations) // 2,
            activation_bytes=three.kept_bytes - two.kept_bytes,
        )
        for (block_name, block), two, three in costs
    )
    return ModelSummary(
        name=name,
        input_shape=model.input_shape,
        rows=rows,
        blocks=len(rows),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        multiply_adds=sum(row.multiply_adds for row in rows),
        activation_bytes=sum(row.activation_bytes for row in rows),
    )


@dataclass(frozen=True)
class _Cost:
    shape: tuple[int, ...]
    operations: int
    kept_bytes: int


class _SavedBytes:
    """Sums the bytes that autograd saves, without those of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        known = (*model.parameters(), *model.buffers())
        self._seen = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._seen:
            self._seen[id(storage)] = storage
            self.bytes += storage.nbytes()
        return tensor


def _trace(model: Network, *, samples: int) -> Iterator[_Cost]:
    keeper = _SavedBytes(model)
    x = torch.empty(samples, *model.input_shape, device="meta")
    for block in model.blocks.values():
        before = keeper.bytes
        counter, hooks = FlopCounterMode(display=False), saved_tensors_hooks(keeper.pack, lambda tensor: tensor)
        with counter, hooks, rng.at(seed=0, step=0, first=0):
            x = block(x)
        yield _Cost(tuple(x.shape[1:]), counter.get_total_flops(), keeper.bytes - before)


def _name_conv(conv: nn.Conv2d) -> str:
    stride = f" stride {name_size(conv.stride)}" if max(conv.stride) > 1 else ""
    groups = f" groups {conv.groups}" if conv.groups > 1 else ""
    return f"conv {name_size(conv.kernel_size)}{stride}{groups}"


def name_size(size: int | tuple[int, ...]) -> str:
    """Format a size: 28×28."""
    return "×".join(map(str, (size, size) if isinstance(size, int) else size))


_KINDS: dict[type[nn.Module], Callable[[Any], str]] = {
    nn.Conv2d: _name_conv,
    nn.Linear: lambda _: "dense",
    BatchNorm2d: lambda _: "batch norm",
    nn.BatchNorm2d: lambda _: "batch norm",
    nn.GroupNorm: lambda norm: f"group norm {norm.num_groups}",
    nn.LayerNorm: lambda _: "layer norm",
    nn.MaxPool2d: lambda pool: f"max-pool {name_size(pool.kernel_size)}",
    nn.AvgPool2d: lambda pool: f"mean-pool {name_size(pool.kernel_size)}",
    nn.AdaptiveAvgPool2d: lambda pool: f"mean-pool to {name_size(pool.output_size)}",
    nn.Flatten: lambda _: "flatten",
    nn.Sigmoid: lambda _: "sigmoid",
    KeyedDropout: lambda dropout: f"dropout {dropout.rate:g}",
}


def name_kind(block: nn.Module) -> str:
    """Return a short description of a block; for a block of several layers, its class name."""
    kind: type[nn.Module] = getattr(block, "replaces", type(block))  # of a native layer, the class it replaces
    return _KINDS.get(kind, lambda _: kind.__name__)(block)


_WIDTH = 440
_MARGIN = 20
_HEAD = 64
_BOX = 46
_GAP = 20

_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #57606a }
  .title { font-size: 17px; font-weight: 600; fill: #1f2328 }
  .name { font-weight: 600; fill: #1f2328 }
  .right { text-anchor: end }
  .page { fill: #ffffff }
  .plain { fill: #f3f4f6; stroke: #c9ced6 }
  .weighted { fill: #dcebfd; stroke: #6aa5e8 }
  .arrow { stroke: #6e7781; fill: none }
  .tip { fill: #6e7781 }
  @media (prefers-color-scheme: dark) {
    text { fill: #a3adb8 }
    .title, .name { fill: #f0f3f6 }
    .page { fill: #0d1117 }
    .plain { fill: #1c222b; stroke: #444c56 }
    .weighted { fill: #13294a; stroke: #3d74b8 }
    .arrow { stroke: #8b949e }
    .tip { fill: #8b949e }
  }
"""


def draw_svg(description: ModelSummary) -> str:
    """Draw the model from top to bottom as a self-contained SVG; blocks with weights are highlighted."""
    height = _HEAD + (_BOX + _GAP) * (description.blocks + 1) - _GAP + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
        f' role="img" aria-label="network {escape(description.name, {chr(34): "&quot;"})}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_MARGIN}" y="30">{escape(description.name)}</text>',
        f'<text x="{_MARGIN}" y="50">{description.parameters:,} parameters, '
        f"{description.multiply_adds:,} multiply-adds per image</text>",
        *_draw_box(_HEAD, ("input", name_size(description.input_shape), "", ""), "plain"),
    ]
    for number, row in enumerate(description.rows, start=1):
        top = _HEAD + number * (_BOX + _GAP)
        parameters = f"{row.parameters:,} parameters" if row.parameters else ""
        lines += _draw_arrow(top)
        words = (row.name, name_size(row.shape), row.kind, parameters)
        lines += _draw_box(top, words, "weighted" if row.parameters else "plain")
    return "\n".join([*lines, "</svg>", ""])


def _draw_box(top: int, words: tuple[str, str, str, str], style: str) -> list[str]:
    name, shape, kind, parameters = map(escape, words)
    left, right = _MARGIN + 12, _WIDTH - _MARGIN - 12
    upper, lower = (top + 19, top + 37) if kind else (top + 28, top + 28)
    return [
        f'<rect class="{style}" x="{_MARGIN}" y="{top}" width="{_WIDTH - 2 * _MARGIN}" height="{_BOX}" rx="6"/>',
        f'<text class="name" x="{left}" y="{upper}">{name}</text>',
        f'<text class="right" x="{right}" y="{upper}">{shape}</text>',
        f'<text x="{left}" y="{lower}">{kind}</text>',
        f'<text class="right" x="{right}" y="{lower}">{parameters}</text>',
    ]


def _draw_arrow(end: int) -> list[str]:
    middle = _WIDTH // 2
    return [
        f'<path class="arrow" d="M{middle} {end - _GAP} V{end - 6}"/>',
        f'<path class="tip" d="M{middle} {end - 1} l-4 -7 h8 z"/>',
    ]
