"""One weight update. This is the only copy: every mode of training goes through it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from convolve.data.loader.loader import Window
from convolve.device import widest_float
from convolve.distributed.collectives import Alone, Team
from convolve.distributed.gradient_sync import NoSynchroniser, Synchroniser
from convolve.distributed.optimizer_sharding import Ownership, SoleOwner
from convolve.engine.forward_backward import Executor
from convolve.engine.state import TrainState
from convolve.layers.batch_norm import NormStatistics
from convolve.optim.optimizers import set_rate
from convolve.optim.schedules import Schedule

Clip = Callable[[nn.Module], None]


@dataclass(frozen=True)
class StepParts:
    """What a step is made of; a part that is switched off is a null object."""

    schedule: Schedule
    executor: Executor
    clip: Clip
    seed: int = 0
    team: Team = field(default_factory=Alone)
    synchronise: Synchroniser = field(default_factory=NoSynchroniser)
    ownership: Ownership | SoleOwner = field(default_factory=SoleOwner)


def train_step(state: TrainState, window: Window, parts: StepParts) -> None:
    """Learn from one window. Prints nothing, saves nothing; reads the device only where a verdict is needed.

    The executor runs the micro batches, replicas synchronise, gradients are settled (unscaled, and all ranks agree
    whether they are finite), then clipped; the update is made under the rounding policy, or skipped and counted; the
    scaler follows the verdict. A skipped step has seen its samples: position and schedule move on.
    """
    set_rate(state.optimiser, parts.schedule(state.samples))
    parts.executor.run(window, state.step, state.scaler.scale)
    statistics = NormStatistics(state.model)
    seen = parts.synchronise(state.model, statistics.flat)
    verdict = state.scaler.settle(state.model, state.arithmetic.overflowed())
    if verdict.clean:
        statistics.settle(seen)
        parts.clip(state.model)
        state.optimiser.step()
        state.arithmetic.settle(state.optimiser, parts.seed, state.step)
        parts.ownership.spread(state.model)
        state.averager.follow(state.model, state.step)
    state.model.zero_grad(set_to_none=True)
    state.step += 1
    state.samples += window.samples
    state.scaler.follow(verdict, state.samples)


def clip_nothing(model: nn.Module) -> None:
    """Leave gradients as they are."""


def clip_to(norm: float, team: Team) -> Clip:
    """Scale the whole gradient, over all stages, down to a norm where it is larger."""

    def clip(model: nn.Module) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        squares = norms.to(widest_float(norms.device)).square().sum()
        length = team.add_stages(squares.view(1)).sqrt().item()
        if length > norm:
            torch._foreach_mul_(gradients, norm / length)

    return clip
