"""Convolutions and matrix products with a 16-bit accumulator, as in hardware with half partials.

The arithmetic: a dot product of length K is cut into chunks of 16 consecutive products. The products of a chunk are
added to the accumulator one by one in fp32, and then the accumulator is rounded to the 16-bit grid:

    acc = 0
    for each chunk:  for each of its products:  acc = acc + a_i * b_i
                     acc = round16(acc)
    result = acc + 0                                   -0 becomes 0

Operands are 16-bit numbers, so a product of two fp16 numbers is exact in fp32. A bias is added last and rounded
separately. The order of products is row and column of the kernel, input channel (for gradients of inputs: row and
column of the rotated kernel, output channel; for gradients of weights: row and column of the output, sample).
Stochastic rounding takes the key of chunk i from `hash_key(key, i)` and counts elements in channels-last memory.

This depends on neither the batch nor the number of threads. A native kernel computes it (`kernels/half_partials.py`);
the form in torch operations has the same bits and is slow.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from convolve.kernels import half_partials
from convolve.kernels.half_partials import CHUNK, Accumulator, GradientKeys, Window
from convolve.numerics.formats import BF16
from convolve.numerics.rounding import Grid, round_, rounded
from convolve.rng import hash_key


def multiply(a: Tensor, b: Tensor, grid: Grid, key: int | None = None) -> Tensor:
    """Return the matrix product of a (M x K) and b (K x N) with a 16-bit accumulator."""
    accumulator, window = _accumulator(grid), Window((1, 1), (0, 0), (1, 1), 1)
    x, weight = a[:, :, None, None], b.t()[:, :, None, None]
    if half_partials.can_run(accumulator, x, weight):
        return half_partials.convolve(x, weight, window, accumulator, key).view(len(a), -1)
    return accumulate(a, b, grid, key)


def multiply_add(bias: Tensor, a: Tensor, b: Tensor, grid: Grid, key: int | None = None) -> Tensor:
    """Return the matrix product with a bias added at the end."""
    acc = multiply(a, b, grid, key) + bias
    round_(acc, grid, None if key is None else hash_key(key, "bias"))
    return acc


def accumulate(a: Tensor, b: Tensor, grid: Grid, key: int | None = None) -> Tensor:
    """Multiply rows a (... x K) by matrices b (... x K x N) with torch operations; leading dimensions broadcast."""
    a, b = rounded(a, grid), rounded(b, grid)
    acc = a.new_zeros(*a.shape[:-1], 1) + b.new_zeros(*b.shape[:-2], b.shape[-1])
    for start in range(0, a.shape[-1], CHUNK):
        for k in range(start, min(start + CHUNK, a.shape[-1])):
            acc += a[..., k, None] * b[..., k, :]
        round_(acc, grid, None if key is None else hash_key(key, start // CHUNK))
    return acc + 0.0


def _accumulator(grid: Grid) -> Accumulator:
    return Accumulator(grid.format is BF16, grid.saturate)


class Convolution:
    """A convolution with a 16-bit accumulator: output and gradients."""

    def __init__(
        self, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, grid: Grid
    ) -> None:
        self.window = Window(stride, padding, dilation, groups)
        self.grid = grid

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, key: int | None) -> Tensor:
        accumulator = _accumulator(self.grid)
        if half_partials.can_run(accumulator, x, weight):
            out = half_partials.convolve(x, weight, self.window, accumulator, key)
        else:
            out = self._forward_with_torch(x, weight, key)
        if bias is not None:
            out = out + bias[:, None, None]
            round_(out, self.grid, None if key is None else hash_key(key, "bias"))
        return _in_layout_of(x, out)

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, output_mask: Sequence[bool], key: int | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of input, weight and bias; `output_mask` selects them."""
        accumulator = _accumulator(self.grid)
        keys = GradientKeys(*(None if key is None else hash_key(key, name) for name in GradientKeys._fields))
        to_input: Tensor | None
        to_weight: Tensor | None
        if half_partials.can_run(accumulator, grad, x, weight):
            to_input, to_weight = half_partials.differentiate(
                grad, (x, weight), self.window, accumulator, keys, output_mask[:2]
            )
        else:
            to_input = self._input_gradient(grad, x, weight, keys.input) if output_mask[0] else None
            to_weight = self._weight_gradient(grad, x, weight, keys.weight) if output_mask[1] else None
        return (
            None if to_input is None else _in_layout_of(x, to_input),
            None if to_weight is None else _in_layout_of(weight, to_weight),
            grad.sum((0, 2, 3)) if output_mask[2] else None,
        )

    def _forward_with_torch(self, x: Tensor, weight: Tensor, key: int | None) -> Tensor:
        taps = self._by_group(weight).permute(0, 3, 2, 1).flatten(1, 2)
        flat = accumulate(
            self._columns(x, weight).permute(0, 4, 1, 3, 2).flatten(3).flatten(0, 1), taps, self.grid, key
        )
        return _as_image(flat.flatten(1), len(x), self.window.output_size(x, weight))

    def _input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, key: int | None) -> Tensor:
        """Correlate the gradient, dilated by the stride, with the rotated kernel."""
        groups, kernel = self.window.groups, tuple(weight.shape[2:])
        dilated = self._dilate(grad, x.shape[2:], kernel)
        columns = functional.unfold(dilated, kernel, dilation=tuple(self.window.dilation))
        columns = columns.view(len(x), groups, len(weight) // groups, -1, columns.shape[-1])
        taps = self._by_group(weight.flip(2, 3)).permute(0, 3, 1, 2).flatten(1, 2)
        flat = accumulate(columns.permute(0, 4, 1, 3, 2).flatten(3).flatten(0, 1), taps, self.grid, key)
        return _as_image(flat.flatten(1), len(x), x.shape[2:])

    def _weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, key: int | None) -> Tensor:
        groups = self.window.groups
        rows = grad.flatten(2).view(len(x), groups, len(weight) // groups, -1).permute(1, 2, 3, 0).flatten(2)
        columns = self._columns(x, weight).permute(1, 4, 0, 3, 2).flatten(3).flatten(1, 2)
        flat = accumulate(rows, columns[:, None], self.grid, key)
        return _as_image(flat.view(-1, weight.shape[1]), len(weight), weight.shape[2:])

    def _dilate(self, g: Tensor, size: Sequence[int], kernel: Sequence[int]) -> Tensor:
        stride, padding, dilation, _ = self.window
        rows, columns = ((g.shape[2 + d] - 1) * stride[d] + 1 for d in (0, 1))
        dilated = g.new_zeros(g.shape[0], g.shape[1], rows, columns)
        dilated[:, :, :: stride[0], :: stride[1]] = g
        pads: list[int] = []
        for d, length in ((1, columns), (0, rows)):
            reach = dilation[d] * (kernel[d] - 1)
            before = reach - padding[d]
            pads += [before, size[d] + reach - length - before]
        return functional.pad(dilated, pads)

    def _columns(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the pixels that meet the kernel: sample, group, channel, tap, pixel of the output."""
        stride, padding, dilation, groups = self.window
        columns = functional.unfold(x, tuple(weight.shape[2:]), tuple(dilation), tuple(padding), tuple(stride))
        return columns.view(len(x), groups, weight.shape[1], -1, columns.shape[-1])

    def _by_group(self, weight: Tensor) -> Tensor:
        """Return the weight as group, output channel, input channel, tap."""
        return weight.reshape(self.window.groups, -1, weight.shape[1], weight[0, 0].numel())


def _as_image(flat: Tensor, images: int, size: Sequence[int]) -> Tensor:
    """Return values in channels-last memory as an image."""
    return flat.view(images, size[0], size[1], -1).permute(0, 3, 1, 2)


def _in_layout_of(like: Tensor, image: Tensor) -> Tensor:
    channels_last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    return image if channels_last else image.contiguous()
