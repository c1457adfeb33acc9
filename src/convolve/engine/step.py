"""One weight update. This is the only copy: every mode of training goes through it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from convolve.data.loader import Window
from convolve.engine.executor import Executor
from convolve.engine.state import TrainState
from convolve.optim.optimisers import set_rate
from convolve.optim.schedules import Schedule

Clip = Callable[[nn.Module], None]


@dataclass(frozen=True)
class StepParts:
    """What a step is made of; a part that is switched off is a null object."""

    schedule: Schedule
    executor: Executor
    clip: Clip


def train_step(state: TrainState, window: Window, parts: StepParts) -> None:
    """Learn from one window. Reads no value from the device, prints nothing, saves nothing."""
    set_rate(state.optimiser, parts.schedule(state.samples))
    parts.executor.run(window, state.step)
    parts.clip(state.model)
    state.optimiser.step()
    state.optimiser.zero_grad(set_to_none=True)
    state.step += 1
    state.samples += window.samples


def clip_nothing(model: nn.Module) -> None:
    """Leave gradients as they are."""


def clip_to(norm: float) -> Clip:
    """Scale the whole gradient down to a norm where it is larger."""

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), norm)

    return clip
