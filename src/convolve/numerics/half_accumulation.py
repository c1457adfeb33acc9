"""Convolutions and matrix products with a 16-bit accumulator, as in hardware with half partials.

The arithmetic: a dot product of length K is cut into chunks of 16 consecutive products. The products of a chunk are
summed in double precision (a product of two 16-bit numbers has at most 22 significant bits). The sum is added to the
accumulator, and the accumulator is rounded to the 16-bit grid, once for each chunk:

    acc = 0
    for each chunk:  acc = round16(acc + sum of a_i * b_i over the chunk)

A bias is added last and rounded separately. The order of products is input channel, row, column of the kernel (for
gradients of weights: sample, row, column of the image). To round a double to 16 bits only once, it first becomes the
adjacent float32 whose last bit is odd, unless it is a float32 already. This cannot create a tie (round to odd).
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
    """Return the matrix product of a (M x K) and b (K x N) with a 16-bit accumulator."""
    acc = a.new_zeros(a.shape[0], b.shape[1])
    left, right = a.double(), b.double()
    for number, start in enumerate(range(0, a.shape[1], CHUNK)):
        stop = start + CHUNK
        acc = _to_odd(acc.double() + left[:, start:stop] @ right[start:stop])
        round_(acc, grid, None if key is None else hash_key(key, number))
    return acc


def multiply_add(bias: Tensor, a: Tensor, b: Tensor, grid: Grid, key: int | None = None) -> Tensor:
    """Return the matrix product with a bias added at the end."""
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
    """A convolution as matrix products: output and gradients."""

    def __init__(
        self, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, grid: Grid
    ) -> None:
        self.stride, self.padding, self.dilation = tuple(stride), tuple(padding), tuple(dilation)
        self.groups = groups
        self.grid = grid

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, key: int | None) -> Tensor:
        outputs = []
        for number, (part, kernel) in enumerate(zip(self._split(x), weight.chunk(self.groups), strict=True)):
            columns = self._columns(part, kernel)
            group_key = None if key is None else hash_key(key, number)
            outputs.append(multiply(columns, kernel.flatten(1).t(), self.grid, group_key))
        flat = torch.cat(outputs, 1)
        if bias is not None:
            flat = flat + bias
            round_(flat, self.grid, None if key is None else hash_key(key, "bias"))
        return self._image(flat, x, self._size(x, weight))

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, output_mask: Sequence[bool], key: int | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of input, weight and bias; `output_mask` selects them."""
        to_input = self._input_gradient(grad, x, weight, key) if output_mask[0] else None
        to_weight = self._weight_gradient(grad, x, weight, key) if output_mask[1] else None
        return to_input, to_weight, grad.sum((0, 2, 3)) if output_mask[2] else None

    def _weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, key: int | None) -> Tensor:
        parts = []
        groups = zip(self._split(grad), self._split(x), weight.chunk(self.groups), strict=True)
        for number, (g, part, kernel) in enumerate(groups):
            rows = g.permute(1, 0, 2, 3).flatten(1)
            group_key = None if key is None else hash_key(key, "weight", number)
            parts.append(multiply(rows, self._columns(part, kernel), self.grid, group_key).view(kernel.shape))
        return torch.cat(parts)

    def _input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, key: int | None) -> Tensor:
        """Correlate the gradient, dilated by the stride, with the flipped kernel."""
        outputs = []
        for number, (g, kernel) in enumerate(zip(self._split(grad), weight.chunk(self.groups), strict=True)):
            dilated = self._dilate(g, x.shape[2:], kernel.shape[2:])
            columns = functional.unfold(dilated, tuple(kernel.shape[2:]), dilation=self.dilation)
            flipped = kernel.flip(2, 3).transpose(0, 1).flatten(1)
            group_key = None if key is None else hash_key(key, "input", number)
            rows = columns.transpose(1, 2).reshape(-1, columns.shape[1])
            outputs.append(multiply(rows, flipped.t(), self.grid, group_key))
        return self._image(torch.cat(outputs, 1), x, tuple(x.shape[2:]))

    def _dilate(self, g: Tensor, size: Sequence[int], kernel: Sequence[int]) -> Tensor:
        rows, columns = ((g.shape[2 + d] - 1) * self.stride[d] + 1 for d in (0, 1))
        dilated = g.new_zeros(g.shape[0], g.shape[1], rows, columns)
        dilated[:, :, :: self.stride[0], :: self.stride[1]] = g
        pads: list[int] = []
        for d, length in ((1, columns), (0, rows)):
            reach = self.dilation[d] * (kernel[d] - 1)
            before = reach - self.padding[d]
            pads += [before, size[d] + reach - length - before]
        return functional.pad(dilated, pads)

    def _split(self, x: Tensor) -> Sequence[Tensor]:
        return x.chunk(self.groups, 1)

    def _columns(self, x: Tensor, weight: Tensor) -> Tensor:
        size = tuple(weight.shape[2:])
        columns = functional.unfold(x, size, dilation=self.dilation, padding=self.padding, stride=self.stride)
        return columns.transpose(1, 2).reshape(-1, columns.shape[1])

    def _size(self, x: Tensor, weight: Tensor) -> tuple[int, int]:
        height, width = (
            (x.shape[2 + d] + 2 * self.padding[d] - self.dilation[d] * (weight.shape[2 + d] - 1) - 1) // self.stride[d]
            + 1
            for d in (0, 1)
        )
        return height, width

    def _image(self, flat: Tensor, like: Tensor, size: Sequence[int]) -> Tensor:
        image = flat.view(like.shape[0], size[0], size[1], -1).permute(0, 3, 1, 2)
        channels_last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
        return image if channels_last else image.contiguous()
