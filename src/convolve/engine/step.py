"""One optimizer step. This is the only copy: every mode of training runs it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from convolve.data.loader.loader import StepBatch
from convolve.device import accumulation_dtype
from convolve.distributed.collectives import Collectives, SingleProcess
from convolve.distributed.gradient_sync import GradientSync, NoSync
from convolve.distributed.optimizer_sharding import NoSharding, OptimizerSharding
from convolve.distributed.stop_votes import OwnVote, StopVotes
from convolve.engine.evaluate import LogitsFn
from convolve.engine.forward_backward import ForwardBackwardFn
from convolve.engine.metrics import Metrics, NullMetrics
from convolve.engine.objective import Objective
from convolve.engine.state import TrainState
from convolve.engine.verification import NoVerification, Verification
from convolve.layers.batch_norm import NormStatistics
from convolve.layers.generators import keyed_generators
from convolve.optim.optimizers import set_learning_rate
from convolve.optim.schedules import Schedule

ClipFn = Callable[[nn.Module], None]
UpdateFn = Callable[[TrainState], None]
UnfreezeFn = Callable[[int], None]


def no_clipping(model: nn.Module) -> None:
    """Keep gradients as they are."""


def train_all(samples: int) -> None:
    """Train all blocks from the start."""


def update_weights(state: TrainState) -> None:
    """Update the weights by the optimizer."""
    state.optimizer.step()


def keyed_update(seed: int) -> UpdateFn:
    """Return an update for an optimizer of the user's code, with global generators keyed by the step."""

    def update(state: TrainState) -> None:
        device = next(state.model.parameters()).device
        with keyed_generators(seed, state.step, "optimizer", device=device):
            state.optimizer.step()

    return update


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Components of a training step; disabled ones are null objects.

    `infer` returns logits through the pipeline, for evaluation between steps; None if the model is not split.
    """

    schedule: Schedule
    forward_backward: ForwardBackwardFn
    unfreeze: UnfreezeFn = train_all
    clip: ClipFn = no_clipping
    update: UpdateFn = update_weights
    seed: int = 0
    collectives: Collectives = field(default_factory=SingleProcess)
    grad_sync: GradientSync = field(default_factory=NoSync)
    stop_votes: StopVotes = field(default_factory=OwnVote)
    sharding: OptimizerSharding | NoSharding = field(default_factory=NoSharding)
    metrics: Metrics = field(default_factory=NullMetrics)
    objective: Objective = field(default_factory=Objective)
    verification: Verification = field(default_factory=NoVerification)
    native_layers: tuple[str, ...] = ()
    infer: LogitsFn | None = None


def train_step(state: TrainState, batch: StepBatch, parts: StepParts, *, stop: bool = False) -> Tensor:
    """Run one optimizer step on a global batch. Does no I/O; syncs with the device only for the gradient check.

    Accumulate gradients over micro batches, sum them over replicas, unscale them and check on all ranks that they are
    finite. If they are, clip them, update the weights under the rounding policy and the average of the weights.
    Otherwise the step is skipped and counted: position and schedule advance, weights do not change.

    Returns a number above 0 if a replica passed `stop`, still on the device.
    """
    set_learning_rate(state.optimizer, parts.schedule(state.samples))
    parts.unfreeze(state.samples)
    parts.forward_backward.run(batch, state.step, state.scaler.scale)
    statistics = NormStatistics(state.model, batch.leaves, batch.count)
    norm_sums, stop_votes = sync_gradients(parts.grad_sync, statistics.rows, stop)
    check = state.scaler.unscale_(state.model, state.execution.overflowed())
    parts.verification.check(state)
    if check.finite:
        statistics.update_running_stats(norm_sums)
        parts.clip(state.model)
        parts.update(state)
        state.execution.round_weights_(state.optimizer, parts.seed, state.step)
        parts.sharding.broadcast_updated(state.model)
        state.ema.update(state.model, state.step)
        parts.verification.record(state)
    state.model.zero_grad(set_to_none=True)
    state.step += 1
    state.samples += batch.global_samples
    state.scaler.update(check, state.samples)
    parts.verification.check_replicas(state, due=False)
    return stop_votes


def sync_gradients(grad_sync: GradientSync, statistics: list[Tensor], stop: bool) -> tuple[Tensor, Tensor]:
    """Complete the gradients, and return the sums of the batch-norm statistics and of the stop flag over replicas.

    The flag is counted once for each node that a replica contributes. A replica without a micro batch contributes
    none; its flag counts in the next step.
    """
    totals = grad_sync.finish([torch.cat((row, row.new_full((1,), stop))) for row in statistics])
    return totals[:-1], totals[-1:]


def clip_to_norm(max_norm: float, collectives: Collectives) -> ClipFn:
    """Return a function that scales gradients so their norm over all stages is at most `max_norm`.

    The factor stays on the device. A norm that is not a number changes nothing.
    """

    def clip(model: nn.Module) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        squares = norms.to(accumulation_dtype(norms.device)).square().sum()
        norm = collectives.sum_over_stages(squares.view(1)).sqrt().squeeze()
        factor = torch.where(norm > max_norm, max_norm / norm, 1.0)
        torch._foreach_mul_(gradients, factor.to(norms.dtype))

    return clip
