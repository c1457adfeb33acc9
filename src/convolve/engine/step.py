"""One weight update. This is the only copy: every mode of training goes through it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from convolve.data.loader import Window
from convolve.engine.executor import Executor
from convolve.engine.state import TrainState
from convolve.models.batch_norm import settle_batch_norms
from convolve.optim.optimisers import set_rate
from convolve.optim.schedules import Schedule
from convolve.parallel.team import Alone, NoSynchroniser, Synchroniser, Team

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


def train_step(state: TrainState, window: Window, parts: StepParts) -> None:
    """Learn from one window. Prints nothing, saves nothing; reads the device only where a verdict is needed.

    The executor runs the micro batches, replicas synchronise, gradients are settled (unscaled, and all ranks agree
    whether they are finite), then clipped; the update is made under the rounding policy, or skipped and counted; the
    scaler follows the verdict. A skipped step has seen its samples: position and schedule move on.
    """
    set_rate(state.optimiser, parts.schedule(state.samples))
    parts.executor.run(window, state.step, state.scaler.scale)
    parts.synchronise(state.model)
    verdict = state.scaler.settle(state.model, parts.team.agree(state.arithmetic.overflowed()))
    settle_batch_norms(state.model, parts.team.add_up, clean=verdict.clean)
    if verdict.clean:
        parts.clip(state.model)
        state.optimiser.step()
        state.arithmetic.settle(state.optimiser, parts.seed, state.step)
        state.averager.follow(state.model, state.step)
    state.optimiser.zero_grad(set_to_none=True)
    state.step += 1
    state.samples += window.samples
    state.scaler.follow(verdict, state.samples)


def clip_nothing(model: nn.Module) -> None:
    """Leave gradients as they are."""


def clip_to(norm: float) -> Clip:
    """Scale the whole gradient down to a norm where it is larger."""

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), norm)

    return clip
