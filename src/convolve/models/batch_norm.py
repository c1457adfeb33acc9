"""Batch norm whose running statistics move once per step, whatever the layout of the step.

torch's own layer moves them at every forward pass, so gradient accumulation, replicas, pipeline stages and
recomputation each leave other statistics behind. The arithmetic here: a step has micro batches i with n_i samples,
means m_i and unbiased variances v_i, over all replicas. Each forward pass only adds to sums; when the step is settled,

    running mean     := (1 - momentum) * running mean     + momentum * sum(n_i m_i) / sum(n_i)
    running variance := (1 - momentum) * running variance + momentum * sum(n_i v_i) / sum(n_i)

With one micro batch per step this is what torch does. Normalisation itself uses the statistics of each micro batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class BatchNorm2d(nn.BatchNorm2d):
    """Batch norm for images; parameters and buffers are named as in torch."""

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(channels, eps=eps, momentum=momentum)
        self.counting = True
        self._seen = 0
        self._passes = 0
        self._sums: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; in training by the micro batch's own statistics, which are added up for `settle`."""
        if not self.training:
            return super().forward(x)
        found = torch.zeros(2, self.num_features, dtype=torch.float32, device=x.device)
        out = functional.batch_norm(x, found[0], found[1], self.weight, self.bias, True, 1.0, self.eps)
        if self.counting:
            # Not in place: autograd keeps `found` for the backward pass.
            weighted = found * len(x)
            self._sums = weighted if self._sums is None else self._sums.add_(weighted)
            self._seen += len(x)
            self._passes += 1
        return out

    def take_sums(self) -> Tensor:
        """What was added up since the last step, in one flat tensor: means, variances, samples and passes."""
        sums = torch.zeros(2, self.num_features) if self._sums is None else self._sums
        counts = sums.new_tensor([self._seen, self._passes])
        self._sums, self._seen, self._passes = None, 0, 0
        return torch.cat((sums.flatten(), counts))

    def settle(self, sums: Tensor, momentum: float | None = None) -> None:
        """Move the running statistics by what all replicas added up; momentum 1 makes them just that."""
        assert self.running_mean is not None and self.running_var is not None, "statistics are tracked"
        assert self.momentum is not None and self.num_batches_tracked is not None, "momentum is set"
        share = self.momentum if momentum is None else momentum
        mean, variance = (sums[:-2] / sums[-2]).view(2, -1)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)
        self.num_batches_tracked += sums[-1].to(torch.int64)


def settle_batch_norms(model: nn.Module, add_up: Callable[[Tensor], Tensor], *, clean: bool) -> None:
    """Move all running statistics of a model once, by what all replicas saw; a step that is skipped leaves no trace.

    Norms of frozen blocks are in evaluation mode, have seen nothing, and stay as they are.
    """
    norms = [module for module in model.modules() if isinstance(module, BatchNorm2d) and module.training]
    if not norms:
        return
    sums = [norm.take_sums() for norm in norms]
    total = add_up(torch.cat(sums))
    if clean:
        parts = torch.split(total, [len(part) for part in sums])
        for norm, part in zip(norms, parts, strict=True):
            norm.settle(part)
