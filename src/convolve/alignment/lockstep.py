"""Two trainings side by side, from the same weights on the same samples, compared after every step."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from convolve.alignment.compare import Agreement, compare
from convolve.config import Config
from convolve.data.build import DataModule
from convolve.data.loader.loader import StepBatch
from convolve.engine.build import build_model, build_numerics
from convolve.engine.forward_backward import ForwardBackward, PassContext
from convolve.engine.loss import CrossEntropy
from convolve.engine.metrics import NullMetrics
from convolve.engine.state import TrainState
from convolve.engine.step import StepParts, train_step
from convolve.optim.optimizers import build_optimizer
from convolve.optim.schedules import RunSpan, build_schedule

KINDS = ("activation", "gradient", "update")


@dataclass(frozen=True)
class Difference:
    """One tensor of a layer at one step, against the reference."""

    step: int
    kind: str
    layer: str
    agreement: Agreement

    def __str__(self) -> str:
        return f"step {self.step}, {self.kind} of {self.layer}"


@dataclass
class StepRecorder:
    """One of the trainings; after each step it shows activations, gradients and updates by layer."""

    config: Config
    material: DataModule
    total: int
    shown: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, material = self.config, self.material
        where, epoch = material.device, len(material.train_loader())
        model = build_model(config, material.transform, len(material.dataset.classes), where)
        numerics = build_numerics(config, where, Path("."), _ignore, (self.total, epoch))
        numerics.arithmetic.install(model)
        numerics.arithmetic.round_initial_weights()
        optim = config.settled_optim()
        self.state = TrainState(
            model, build_optimizer(model, optim), arithmetic=numerics.arithmetic, scaler=numerics.scaler
        )
        schedule = build_schedule(config.schedule, optim.learning_rate, RunSpan(self.total, epoch))
        loss = CrossEntropy(optim.label_smoothing, optim.label_smoothing_over)
        executor = ForwardBackward(model, loss, NullMetrics(), PassContext(config.run.seed, numerics.arithmetic))
        self.parts = StepParts(schedule, executor, self._see_gradients, config.run.seed)
        for name, block in model.blocks.items():
            block.register_forward_hook(self._see_activation(name))

    def step(self, batch: StepBatch) -> dict[str, dict[str, Tensor]]:
        """Make one step and show what happened in it."""
        self.shown = {kind: {} for kind in KINDS}
        before = {name: parameter.detach().clone() for name, parameter in self.state.model.named_parameters()}
        self.state.model.train()
        train_step(self.state, batch, self.parts)
        for name, parameter in self.state.model.named_parameters():
            self.shown["update"][name] = parameter.detach() - before[name]
        return self.shown

    def _see_activation(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.shown["activation"].setdefault(name, output.detach().float().clone())

        return hook

    def _see_gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.shown["gradient"][name] = parameter.grad.detach().float().clone()


def run_lockstep(reference: Config, other: Config, material: DataModule, steps: int) -> Iterator[Difference]:
    """Differences in the order in which they arise: step by step; activations, then gradients, then updates."""
    loader = material.train_loader()
    total = max(steps * reference.global_batch_size, len(loader))
    first, second = (StepRecorder(config, material, total) for config in (reference, other))
    batches = loader.step_batches(reference.run.seed, 0, reference.optim.batch_size, reference.global_batch_size)
    for number in range(1, steps + 1):
        batch = next(batches)
        one, two = first.step(batch), second.step(batch)
        for kind in KINDS:
            names = list(one[kind]) if kind == "activation" else list(reversed(list(one[kind])))
            for name in names:
                found = two[kind].get(name)
                missing = Agreement(0.0, 1.0, 1.0, 0.0)
                agreement = missing if found is None else compare(one[kind][name], found)
                yield Difference(number, kind, name, agreement)


def _ignore(kind: str, **facts: object) -> None:
    """Events of a comparison are not written down."""
