"""Batch norm whose running statistics are updated once per step, in any layout of the step.

torch's layer updates them in every forward pass, so gradient accumulation, replicas, pipeline stages and recomputation
each change the statistics. The arithmetic here: a step has micro batches i with n_i samples, means m_i and unbiased
variances v_i, over all replicas. A forward pass only adds to sums; after the step,

    running mean     := (1 - momentum) * running mean     + momentum * sum(n_i m_i) / sum(n_i)
    running variance := (1 - momentum) * running variance + momentum * sum(n_i v_i) / sum(n_i)

With one micro batch per step this equals torch. Normalization itself uses the statistics of each micro batch. One with
a single value per channel, such as a last sample at 1 x 1 pixels, becomes the bias and is not counted; torch raises.

Synced norms treat the micro batches of a span of replicas as one. With N, S = sum(x) and Q = sum(x^2) of each channel
summed over the span, mean = S / N and variance = Q / N - mean^2, in the widest format of the device. torch's norm
treats these as constants. With the gradient g that it returns and y = (x - mean) / sqrt(variance + epsilon), the
gradient through the statistics is added by

    dx = g - (sum(g) + y sum(g y)) / N            sums over the span, too
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from convolve.device import accumulation_dtype
from convolve.summation import Node, TreeSum, current_leaf


class SpanSum(Protocol):
    """Sums a tensor over the replicas of a span that run a micro batch now; `members` is their number."""

    @property
    def members(self) -> int: ...

    def __call__(self, values: Tensor) -> Tensor: ...


class StepStatistics(_BatchNorm):
    """A batch norm that sums the statistics of its micro batches, and updates its running statistics once per step."""

    accumulate_stats: bool
    _parts: dict[int, tuple[Tensor, int, float]]

    def start_accumulating(self) -> None:
        """Set the attributes that stock layers lack."""
        self.accumulate_stats = True
        self._parts = {}

    def _add_statistics(self, x: Tensor, statistics: Tensor, passes: float) -> None:
        """Add mean and unbiased variance to the sums of this micro batch."""
        if self.accumulate_stats:
            # Not in place: autograd saves the statistics for the backward pass.
            weighted, seen, leaf = statistics * len(x), len(x), current_leaf()
            number = 0 if leaf is None else leaf.number
            if number in self._parts:
                sums, samples, before = self._parts[number]
                weighted, seen, passes = sums.add_(weighted), samples + seen, before + passes
            self._parts[number] = (weighted, seen, passes)

    @property
    def has_sums(self) -> bool:
        """True if this norm has run since the last step."""
        return bool(self._parts)

    def take_part(self, leaf: int) -> Tensor:
        """Return and reset the sums of a micro batch, as one flat tensor: means, variances, samples and passes."""
        assert self.running_mean is not None, "statistics are tracked"
        sums, seen, passes = self._parts.pop(leaf, (None, 0, 0.0))
        if sums is None:
            sums = self.running_mean.new_zeros(2, self.num_features)
        # Filled on the device: a copy from the host would have to be waited for.
        counts = (sums.new_full((1,), seen), sums.new_full((1,), passes))
        return torch.cat((sums.flatten(), *counts))

    def take_sums(self) -> Tensor:
        """Return and reset the sums since the last step, outside of training all in one part."""
        assert not self._parts or list(self._parts) == [0], "passes outside of a step have no leaf"
        return self.take_part(0)

    def update_running_stats(self, sums: Tensor, momentum: float | None = None) -> None:
        """Update the running statistics by the sums over all replicas; momentum 1 replaces them.

        Without a momentum in the layer (torch: the cumulative average), every micro batch since the start counts alike.
        """
        assert self.running_mean is not None and self.running_var is not None, "statistics are tracked"
        assert self.num_batches_tracked is not None, "passes are counted"
        mean, variance = (sums[:-2] / sums[-2]).view(2, -1)
        self.num_batches_tracked += sums[-1].round().to(torch.int64)
        weight: Tensor | float | None = self.momentum if momentum is None else momentum
        if weight is None:
            weight = sums[-1] / self.num_batches_tracked
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance, weight)

    def update_if_seen(self, sums: Tensor) -> None:
        """Do the same if any replica has run this norm, for one that did not run here."""
        buffers = (self.running_mean, self.running_var, self.num_batches_tracked)
        before = [buffer.clone() for buffer in buffers if buffer is not None]
        self.update_running_stats(sums)
        for buffer, old in zip(buffers, before, strict=True):
            assert buffer is not None, "statistics are tracked"
            buffer.copy_(torch.where(sums[-2] > 0, buffer, old))


class BatchNorm2d(StepStatistics, nn.BatchNorm2d):
    """Batch norm for images, with the parameter and buffer names of torch."""

    _span: SpanSum | None

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(channels, eps=eps, momentum=momentum)
        self.start_accumulating()

    def start_accumulating(self) -> None:
        super().start_accumulating()
        self._span = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize; in training by the micro batch's statistics, which are summed for `update_running_stats`."""
        if not self.training:
            return super().forward(x)
        if self._span is None and x.numel() == self.num_features:
            return self._normalize_single(x)
        normalized = self._normalize_local(x) if self._span is None else self._normalize_synced(x, self._span)
        out, statistics, passes = normalized
        self._add_statistics(x, statistics, passes)
        return out

    def sync(self, add: SpanSum) -> None:
        """Treat the concurrent micro batches of a span of replicas as one; `add` sums a tensor over them."""
        self._span = add

    def _normalize_single(self, x: Tensor) -> Tensor:
        """Normalize one value per channel: it is its mean. Its variance is unknown, so no statistics are added."""
        zeros = x - x
        return zeros * self.weight[:, None, None] + self.bias[:, None, None] if self.affine else zeros

    def _normalize_local(self, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return the output, [mean, unbiased variance], and the number of passes."""
        statistics = torch.zeros(2, self.num_features, dtype=torch.float32, device=x.device)
        out = functional.batch_norm(x, statistics[0], statistics[1], self.weight, self.bias, True, 1.0, self.eps)
        return out, statistics, 1.0

    def _normalize_synced(self, x: Tensor, add: SpanSum) -> tuple[Tensor, Tensor, float]:
        """Return the same over a span, in which each replica counts a fraction of one pass."""
        with torch.no_grad():
            wide = x.to(accumulation_dtype(x.device))
            sums = wide.sum(dim=(0, 2, 3)), wide.square_().sum(dim=(0, 2, 3))
            total = add(torch.cat((*sums, sums[0].new_full((1,), x.numel() // self.num_features))))
            mean, square = (total[:-1] / total[-1]).view(2, -1)
            variance = (square - mean * mean).clamp_min_(0)
            unbiased = variance * (total[-1] / (total[-1] - 1).clamp_min(1))
        center, spread = mean.float(), variance.float()
        through = _SyncStatistics.apply(x, center, spread, self.eps, total[-1], add)  # type: ignore[no-untyped-call]
        out = functional.batch_norm(through, center, spread, self.weight, self.bias, False, 0.0, self.eps)
        return out, torch.stack((center, unbiased.float())), 1 / add.members


class _SyncStatistics(torch.autograd.Function):
    """Identity whose backward pass adds the gradient through the statistics of a span."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, eps: float, count: Tensor, add: SpanSum) -> Tensor:
        ctx.save_for_backward(x, mean, (variance + eps).rsqrt())
        ctx.count, ctx.add = count, add
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        g, (x, mean, scale) = grads[0], ctx.saved_tensors
        y = (x - mean[:, None, None]).mul_(scale[:, None, None])
        wide = accumulation_dtype(g.device)
        local = torch.stack([values.sum(dim=(0, 2, 3), dtype=wide) for values in (g, g * y)])
        plain, along = (ctx.add(local) / ctx.count).float()
        return g - plain[:, None, None] - y.mul_(along[:, None, None]), None, None, None, None, None


class NormStatistics:
    """Sums that the batch norms of a model have collected since the last step; taking them resets the norms.

    `rows` are the nodes in which the sum over the micro batches of this replica, `leaves` of `count`, ends; by default
    it has all of them in one. Replicas sum `rows`, and each must update by the total. A skipped step updates nothing.
    Norms of frozen blocks are in evaluation mode, collect nothing, and do not change.
    """

    def __init__(self, model: nn.Module, leaves: range = range(1), count: int = 1) -> None:
        self._norms = [module for module in model.modules() if isinstance(module, StepStatistics)]
        self._seen = [norm.has_sums for norm in self._norms]
        self._sizes = [2 * norm.num_features + 2 for norm in self._norms]
        device = next((parameter.device for parameter in model.parameters()), None)
        tree = TreeSum[Tensor](count, lambda left, right, first: left.add_(right))
        for leaf in leaves:
            parts = [norm.take_part(leaf) for norm in self._norms]
            tree.push(Node(leaf, 1), torch.cat(parts) if parts else torch.empty(0, device=device))
        self.rows = tree.values

    @property
    def pending_sums(self) -> Tensor:
        """The sums of a replica that runs all micro batches."""
        (row,) = self.rows
        return row

    def update_running_stats(self, total: Tensor) -> None:
        """Update all running statistics once, by the sums over all replicas."""
        parts = torch.split(total, self._sizes) if self._sizes else ()
        for norm, seen, part in zip(self._norms, self._seen, parts, strict=True):
            if norm.training:
                (norm.update_running_stats if seen else norm.update_if_seen)(part)
