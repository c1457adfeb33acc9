"""Two runs in lockstep, from the same weights on the same samples, compared after every step.

With a the reference and b the other: cosine = a.b / |a||b|, relative error = |a - b| / |a|, and the lost fraction of an
update is 1 - a.b / a.a. Stochastic rounding moves few weights, each too far: on average it loses nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from convolve.config import Config
from convolve.data.build import DataModule
from convolve.data.loader.loader import StepBatch
from convolve.distributed.collectives import SingleProcess
from convolve.engine.build import build, build_numerics
from convolve.engine.step import train_step
from convolve.optim.schedules import RunSpan

KINDS = ("activation", "gradient", "update")


@dataclass(frozen=True)
class Agreement:
    """Agreement of one tensor with its reference; `energy` is the reference's squared norm."""

    cosine: float
    relative_error: float
    lost_share: float
    energy: float


def compare(reference: Tensor, other: Tensor) -> Agreement:
    """Compare a tensor with its reference."""
    a, b = reference.detach().double().flatten(), other.detach().double().flatten()
    if not bool(b.isfinite().all()):
        return Agreement(math.nan, math.inf, 0.0, 0.0)
    norms = float(a.norm()), float(b.norm())
    cosine = float(a @ b) / (norms[0] * norms[1]) if all(norms) else float(norms[0] == norms[1])
    error = float((a - b).norm()) / norms[0] if norms[0] else (0.0 if not norms[1] else math.inf)
    energy = norms[0] ** 2
    return Agreement(min(cosine, 1.0), error, 1.0 - float(a @ b) / energy if energy else 0.0, energy)


@dataclass(frozen=True)
class Difference:
    """One tensor of a layer at one step, against the reference."""

    step: int
    kind: str
    layer: str
    agreement: Agreement

    def __str__(self) -> str:
        return f"step {self.step}, {self.kind} of {self.layer}"


class StepRecorder:
    """One of the two runs; records activations, gradients and updates of each step by layer."""

    def __init__(self, config: Config, data: DataModule, span: RunSpan) -> None:
        # Activations are compared layer by layer, which fused kernels do not expose.
        config = config.replace(kernels="torch", metrics=False)
        numerics = build_numerics(config, data.device, span, folder=Path("."))
        self.state, parts = build(config=config, data=data, collectives=SingleProcess(), numerics=numerics, span=span)
        self.parts = replace(parts, clip=self._record_gradients)
        self.recorded: dict[str, dict[str, Tensor]] = {}
        for name, block in self.state.model.blocks.items():
            block.register_forward_hook(self._record_activation(name))

    def step(self, batch: StepBatch) -> dict[str, dict[str, Tensor]]:
        """Run one step and return its tensors by kind and layer."""
        self.recorded = {kind: {} for kind in KINDS}
        before = {name: parameter.detach().clone() for name, parameter in self.state.model.named_parameters()}
        self.state.model.train()
        train_step(self.state, batch, self.parts)
        for name, parameter in self.state.model.named_parameters():
            self.recorded["update"][name] = parameter.detach() - before[name]
        return self.recorded

    def _record_activation(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.recorded["activation"].setdefault(name, output.detach().float().clone())

        return hook

    def _record_gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.recorded["gradient"][name] = parameter.grad.detach().float().clone()


def run_lockstep(reference: Config, other: Config, data: DataModule, steps: int) -> Iterator[Difference]:
    """Yield differences in the order of computation: step by step; activations, then gradients, then updates."""
    loader = data.train_loader()
    span = RunSpan(max(steps * reference.global_batch_size, len(loader)), len(loader))
    first, second = (StepRecorder(config, data, span) for config in (reference, other))
    batches = loader.step_batches(reference.run.seed, 0, reference.optim.batch_size, reference.global_batch_size)
    for number in range(1, steps + 1):
        batch = next(batches)
        one, two = first.step(batch), second.step(batch)
        for kind in KINDS:
            names = list(one[kind]) if kind == "activation" else list(reversed(list(one[kind])))
            for name in names:
                other_value = two[kind].get(name)
                missing = Agreement(0.0, 1.0, 1.0, 0.0)
                agreement = missing if other_value is None else compare(one[kind][name], other_value)
                yield Difference(number, kind, name, agreement)
