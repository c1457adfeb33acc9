"""Convolutions and matrix products that add up in 16 bits, as hardware with half partials does.

The arithmetic: a dot product of length K is cut into chunks of 16 consecutive products. The products of a chunk are
added exactly (in double precision; products of two 16-bit numbers have at most 22 significant bits); the sum is added
to the accumulator, and the accumulator is rounded to the 16-bit grid, once for each chunk:

    acc = 0
    for each chunk:  acc = round16(acc + sum of a_i * b_i over the chunk)

A bias is added last, with a rounding of its own. The order of products is input channel, row, column of the kernel (for
gradients of weights: sample, row, column of the image). To round a double to 16 bits only once, it first becomes the
float32 next to it whose last bit is odd, unless it is a float32 already; no tie can then arise that was none.
Convolutions are unfolded into matrix products, so this is exact and slow.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from convolve.numerics.rounding import Grid, round_
from convolve.rng import hash_key

CHUNK = 16


def multiply(a: Tensor, b: Tensor, grid: Grid, key: int | None = None) -> Tensor:
    """The matrix product of a (M x K) and b (K x N) with a 16-bit accumulator."""
    acc = a.new_zeros(a.shape[0], b.shape[1])
    left, right = a.double(), b.double()
    for number, start in enumerate(range(0, a.shape[1], CHUNK)):
        stop = start + CHUNK
        acc = _to_odd(acc.double() + left[:, start:stop] @ right[start:stop])
        round_(acc, grid, None if key is None else hash_key(key, number))
    return acc


def multiply_add(bias: Tensor, a: Tensor, b: Tensor, grid: Grid, key: int | None = None) -> Tensor:
    """The same with a bias added at the end."""
    acc = multiply(a, b, grid, key) + bias
    round_(acc, grid, None if key is None else hash_key(key, "bias"))
    return acc


def _to_odd(exact: Tensor) -> Tensor:
    near = exact.float()
    error = exact - near.double()
    word = near.view(torch.int32)
    away = (error > 0) == (near > 0)
    moved = word + torch.where(away, 1, -1).to(torch.int32)
    inexact = (error != 0) & ((word & 1) == 0) & near.isfinite() & (near != 0)
    return torch.where(inexact, moved, word).view(torch.float32)


class Convolution:
    """One convolution as matrix products: forward, and both gradients."""

    def __init__(
        self, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, grid: Grid
    ) -> None:
        self.stride, self.padding, self.dilation = tuple(stride), tuple(padding), tuple(dilation)
        self.groups = groups
        self.grid = grid

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, key: int | None) -> Tensor:
        """The output of the convolution."""
        outputs = []
        for number, (part, kernel) in enumerate(zip(self._split(x), weight.chunk(self.groups), strict=True)):
            columns = self._columns(part, kernel)
            own = None if key is None else hash_key(key, number)
            outputs.append(multiply(columns, kernel.flatten(1).t(), self.grid, own))
        flat = torch.cat(outputs, 1)
        if bias is not None:
            flat = flat + bias
            round_(flat, self.grid, None if key is None else hash_key(key, "bias"))
        return self._image(flat, x, self._size(x, weight))

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool], key: int | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias, where they are wanted."""
        to_input = self._input_gradient(grad, x, weight, key) if wanted[0] else None
        to_weight = self._weight_gradient(grad, x, weight, key) if wanted[1] else None
        return to_input, to_weight, grad.sum((0, 2, 3)) if wanted[2] else None

    def _weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, key: int | None) -> Tensor:
        parts = []
        groups = zip(self._split(grad), self._split(x), weight.chunk(self.groups), strict=True)
        for number, (g, part, kernel) in enumerate(groups):
            rows = g.permute(1, 0, 2, 3).flatten(1)
            own = None if key is None else hash_key(key, "weight", number)
            parts.append(multiply(rows, self._columns(part, kernel), self.grid, own).view(kernel.shape))
        return torch.cat(parts)

    def _input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, key: int | None) -> Tensor:
        """The gradient spread out by the stride, correlated with the turned kernel."""
        outputs = []
        for number, (g, kernel) in enumerate(zip(self._split(grad), weight.chunk(self.groups), strict=True)):
            spread = self._spread(g, x.shape[2:], kernel.shape[2:])
            columns = functional.unfold(spread, tuple(kernel.shape[2:]), dilation=self.dilation)
            turned = kernel.flip(2, 3).transpose(0, 1).flatten(1)
            own = None if key is None else hash_key(key, "input", number)
            rows = columns.transpose(1, 2).reshape(-1, columns.shape[1])
            outputs.append(multiply(rows, turned.t(), self.grid, own))
        return self._image(torch.cat(outputs, 1), x, tuple(x.shape[2:]))

    def _spread(self, g: Tensor, size: Sequence[int], kernel: Sequence[int]) -> Tensor:
        rows, columns = ((g.shape[2 + d] - 1) * self.stride[d] + 1 for d in (0, 1))
        spread = g.new_zeros(g.shape[0], g.shape[1], rows, columns)
        spread[:, :, :: self.stride[0], :: self.stride[1]] = g
        pads: list[int] = []
        for d, length in ((1, columns), (0, rows)):
            reach = self.dilation[d] * (kernel[d] - 1)
            before = reach - self.padding[d]
            pads += [before, size[d] + reach - length - before]
        return functional.pad(spread, pads)

    def _split(self, x: Tensor) -> Sequence[Tensor]:
        return x.chunk(self.groups, 1)

    def _columns(self, x: Tensor, weight: Tensor) -> Tensor:
        size = tuple(weight.shape[2:])
        columns = functional.unfold(x, size, dilation=self.dilation, padding=self.padding, stride=self.stride)
        return columns.transpose(1, 2).reshape(-1, columns.shape[1])

    def _size(self, x: Tensor, weight: Tensor) -> tuple[int, int]:
        high, wide = (
            (x.shape[2 + d] + 2 * self.padding[d] - self.dilation[d] * (weight.shape[2 + d] - 1) - 1) // self.stride[d]
            + 1
            for d in (0, 1)
        )
        return high, wide

    def _image(self, flat: Tensor, like: Tensor, size: Sequence[int]) -> Tensor:
        image = flat.view(like.shape[0], size[0], size[1], -1).permute(0, 3, 1, 2)
        channels_last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
        return image if channels_last else image.contiguous()
