"""Batch norm whose running statistics move once per step, whatever the layout of the step.

torch's own layer moves them at every forward pass, so gradient accumulation, replicas, pipeline stages and
recomputation each leave other statistics behind. The arithmetic here: a step has micro batches i with n_i samples,
means m_i and unbiased variances v_i, over all replicas. Each forward pass only adds to sums; when the step is settled,

    running mean     := (1 - momentum) * running mean     + momentum * sum(n_i m_i) / sum(n_i)
    running variance := (1 - momentum) * running variance + momentum * sum(n_i v_i) / sum(n_i)

With one micro batch per step this is what torch does. Normalization itself uses the statistics of each micro batch.

Norms of a span of replicas see their micro batches as one. With N, S = sum(x) and Q = sum(x^2) of each channel added up
over the span, mean = S / N and variance = Q / N - mean^2, in the widest format that the device has. To torch's norm
these are constants; what flows back through them, with g the gradient that the norm hands on and
y = (x - mean) / sqrt(variance + epsilon), is

    dx = g - (sum(g) + y sum(g y)) / N            sums over the span, as well
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from convolve.device import accumulation_dtype

SumFn = Callable[[Tensor], Tensor]


class BatchNorm2d(nn.BatchNorm2d):
    """Batch norm for images, with the parameter and buffer names of torch."""

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(channels, eps=eps, momentum=momentum)
        self.counting = True
        self._span: tuple[int, SumFn] | None = None
        self._seen = 0
        self._passes = 0.0
        self._sums: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize; in training by the micro batch's own statistics, which are added up for `settle`."""
        if not self.training:
            return super().forward(x)
        out, found, share = self._normalize_alone(x) if self._span is None else self._normalize_in_span(x, *self._span)
        self._add_statistics(x, found, share)
        return out

    def _add_statistics(self, x: Tensor, found: Tensor, share: float) -> None:
        """Add statistics up for `settle`."""
        if self.counting:
            # Not in place: autograd keeps `found` for the backward pass.
            weighted = found * len(x)
            self._sums = weighted if self._sums is None else self._sums.add_(weighted)
            self._seen += len(x)
            self._passes += share

    def join(self, replicas: int, add: SumFn) -> None:
        """From now on see the micro batches of this many replicas as one; `add` sums a tensor up over them."""
        self._span = (replicas, add)

    def _normalize_alone(self, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """The output, mean and unbiased variance, and how many passes this was."""
        found = torch.zeros(2, self.num_features, dtype=torch.float32, device=x.device)
        out = functional.batch_norm(x, found[0], found[1], self.weight, self.bias, True, 1.0, self.eps)
        return out, found, 1.0

    def _normalize_in_span(self, x: Tensor, replicas: int, add: SumFn) -> tuple[Tensor, Tensor, float]:
        """The same over a span, in which each replica makes its share of one pass."""
        with torch.no_grad():
            wide = x.to(accumulation_dtype(x.device))
            sums = wide.sum(dim=(0, 2, 3)), wide.square_().sum(dim=(0, 2, 3))
            total = add(torch.cat((*sums, sums[0].new_tensor([x.numel() // self.num_features]))))
            mean, square = (total[:-1] / total[-1]).view(2, -1)
            variance = (square - mean * mean).clamp_min_(0)
            unbiased = variance * (total[-1] / (total[-1] - 1).clamp_min(1))
        center, spread = mean.float(), variance.float()
        through = _SyncStatistics.apply(x, center, spread, self.eps, float(total[-1]), add)  # type: ignore[no-untyped-call]
        out = functional.batch_norm(through, center, spread, self.weight, self.bias, False, 0.0, self.eps)
        return out, torch.stack((center, unbiased.float())), 1 / replicas

    def take_sums(self) -> Tensor:
        """What was added up since the last step, in one flat tensor: means, variances, samples and passes."""
        sums = self.weight.new_zeros(2, self.num_features) if self._sums is None else self._sums
        counts = sums.new_tensor([self._seen, self._passes])
        self._sums, self._seen, self._passes = None, 0, 0.0
        return torch.cat((sums.flatten(), counts))

    def settle(self, sums: Tensor, momentum: float | None = None) -> None:
        """Move the running statistics by what all replicas added up; momentum 1 makes them just that."""
        assert self.running_mean is not None and self.running_var is not None, "statistics are tracked"
        assert self.momentum is not None and self.num_batches_tracked is not None, "momentum is set"
        share = self.momentum if momentum is None else momentum
        mean, variance = (sums[:-2] / sums[-2]).view(2, -1)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)
        self.num_batches_tracked += sums[-1].round().to(torch.int64)


class _SyncStatistics(torch.autograd.Function):
    """The identity; its backward pass adds what flows through the statistics of a span."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, eps: float, count: float, add: SumFn) -> Tensor:
        ctx.save_for_backward(x, mean, (variance + eps).rsqrt())
        ctx.count, ctx.add = count, add
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        g, (x, mean, scale) = grads[0], ctx.saved_tensors
        y = (x - mean[:, None, None]).mul_(scale[:, None, None])
        wide = accumulation_dtype(g.device)
        local = torch.stack([one.sum(dim=(0, 2, 3), dtype=wide) for one in (g, g * y)])
        plain, along = (ctx.add(local) / ctx.count).float()
        return g - plain[:, None, None] - y.mul_(along[:, None, None]), None, None, None, None, None


class NormStatistics:
    """What the batch norms of a model have seen since the last step, taken out of them.

    `flat` is what replicas add up; each of them must settle by the sum. A step that is skipped settles nothing, and
    leaves no trace. Norms of frozen blocks are in evaluation mode, have seen nothing, and stay as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = [module for module in model.modules() if isinstance(module, BatchNorm2d)]
        self._sums = [norm.take_sums() for norm in self._norms]
        self.flat = torch.cat(self._sums) if self._sums else torch.empty(0)

    def settle(self, total: Tensor) -> None:
        """Move all running statistics once, by what all replicas saw."""
        parts = torch.split(total, [len(part) for part in self._sums]) if self._sums else ()
        for norm, part in zip(self._norms, parts, strict=True):
            if norm.training:
                norm.settle(part)
