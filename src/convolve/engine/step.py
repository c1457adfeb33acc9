"""One weight update. This is the only copy: every mode of training goes through it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from convolve.data.loader.loader import StepBatch
from convolve.device import accumulation_dtype
from convolve.distributed.collectives import Collectives, SingleProcess
from convolve.distributed.gradient_sync import GradientSync, NoSync
from convolve.distributed.optimizer_sharding import NoSharding, OptimizerSharding
from convolve.engine.forward_backward import ForwardBackwardFn
from convolve.engine.state import TrainState
from convolve.layers.batch_norm import NormStatistics
from convolve.optim.optimizers import set_learning_rate
from convolve.optim.schedules import Schedule

Clip = Callable[[nn.Module], None]


@dataclass(frozen=True)
class StepParts:
    """What a step is made of; a part that is switched off is a null object."""

    schedule: Schedule
    executor: ForwardBackwardFn
    clip: Clip
    seed: int = 0
    team: Collectives = field(default_factory=SingleProcess)
    grad_sync: GradientSync = field(default_factory=NoSync)
    ownership: OptimizerSharding | NoSharding = field(default_factory=NoSharding)


def train_step(state: TrainState, batch: StepBatch, parts: StepParts, *, stop: bool = False) -> Tensor:
    """Run one optimizer step on a global batch. Does no I/O; syncs with the device only for the gradient check.

    The executor runs the micro batches, replicas synchronize, gradients are settled (unscaled, and all ranks agree
    whether they are finite), then clipped; the update is made under the rounding policy, or skipped and counted; the
    scaler follows the verdict. A skipped step has seen its samples: position and schedule move on.

    Returns the number of replicas that passed `stop`, still on the device: read it only if there is more than one
    process.
    """
    set_learning_rate(state.optimizer, parts.schedule(state.samples))
    parts.executor.run(batch, state.step, state.scaler.scale)
    statistics = NormStatistics(state.model)
    seen, stop_votes = sync_gradients(parts.grad_sync, statistics.flat, stop)
    verdict = state.scaler.unscale_(state.model, state.arithmetic.overflowed())
    if verdict.finite:
        statistics.settle(seen)
        parts.clip(state.model)
        state.optimizer.step()
        state.arithmetic.round_weights_(state.optimizer, parts.seed, state.step)
        parts.ownership.broadcast_updated(state.model)
        state.averager.follow(state.model, state.step)
    state.model.zero_grad(set_to_none=True)
    state.step += 1
    state.samples += batch.global_samples
    state.scaler.update(verdict, state.samples)
    return stop_votes


def sync_gradients(grad_sync: GradientSync, statistics: Tensor, stop: bool) -> tuple[Tensor, Tensor]:
    """Complete the gradients, and return the sums of the batch-norm statistics and of the stop flag over replicas."""
    totals = grad_sync.finish(torch.cat((statistics, statistics.new_full((1,), stop))))
    return totals[:-1], totals[-1:]


def no_clipping(model: nn.Module) -> None:
    """Leave gradients as they are."""


def clip_to_norm(norm: float, team: Collectives) -> Clip:
    """Scale the whole gradient, over all stages, down to a norm where it is larger."""

    def clip(model: nn.Module) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        squares = norms.to(accumulation_dtype(norms.device)).square().sum()
        length = team.sum_over_stages(squares.view(1)).sqrt().item()
        if length > norm:
            torch._foreach_mul_(gradients, norm / length)

    return clip
