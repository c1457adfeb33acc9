"""The numerics of a run: how its policy is carried out, who watches, and how the loss is scaled."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convolve.config import Config
from convolve.kernels.code import explain_absence
from convolve.models.native_layers import use_native_layers
from convolve.models.network import Network
from convolve.numerics.arithmetic import Arithmetic
from convolve.numerics.choice import Choice, build_arithmetic, choose
from convolve.numerics.diagnostics import OverflowDump, StepDump, Survey, Trap, Watchers, parse_steps
from convolve.numerics.emulation import Watcher
from convolve.numerics.formats import FP16, FP32, Format
from convolve.numerics.scaling import Agree, Scaler, alone, build_scaler

DUMP_FOLDER = "dumps"

Tell = Callable[..., None]


@dataclass(frozen=True)
class Numerics:
    """What was chosen for a run, and the parts that carry it out."""

    choice: Choice
    arithmetic: Arithmetic
    scaler: Scaler

    def facts(self) -> dict[str, Any]:
        """For the record of the run."""
        return {
            **self.choice.policy.to_json(),
            "execution": self.choice.execution,
            "reason": self.choice.reason,
            "loss_scaling": type(self.scaler).__name__,
            "first_loss_scale": self.scaler.scale,
        }


def prepare_numerics(
    config: Config, where: torch.device, folder: Path, tell: Tell, span: tuple[int, int], agree: Agree = alone
) -> Numerics:
    """The numerics that a config asks for; `tell` gets events, `span` is the run and one epoch in samples."""
    precision = config.precision
    watched = bool(precision.data_dump_step or precision.over_dump or precision.survey_freq)
    choice = choose(precision, where, watched=watched)
    watcher = Watchers(_watchers(config, choice, folder / DUMP_FOLDER, tell))
    scaler = build_scaler(precision, choice.policy, span, agree)
    return Numerics(choice, build_arithmetic(choice, where, watcher), scaler)


def compute_like_training(config: Config, network: Network, where: torch.device) -> None:
    """Let a trained network compute as it did while it was validated in training."""
    choice = choose(config.precision, where)
    build_arithmetic(choice, where).attach(network)
    use_kernels(config, network, choice)


def use_kernels(config: Config, network: Network, choice: Choice | None = None) -> list[str]:
    """Let native code compute layers where the config allows it and nobody looks at each result; returns names.

    `choice` is what was chosen for the network's device; without one, what would be for a CPU.
    """
    choice = choice or choose(config.precision, torch.device("cpu"))
    if config.run.kernels == "torch" or choice.execution != "plain":
        return []
    return use_native_layers(network)


def explain_kernels(config: Config, choice: Choice, where: torch.device) -> str | None:
    """Why PyTorch computes layers that native code might have computed; None where it does not, or was asked to."""
    if config.run.kernels == "torch" or choice.execution != "plain" or where.type != "cpu":
        return None
    return explain_absence()


def _watchers(config: Config, choice: Choice, folder: Path, tell: Tell) -> list[Watcher]:
    precision, found = config.precision, list[Watcher]()
    if precision.over_dump:
        found.append(OverflowDump(folder))
    if precision.data_dump_step:
        found.append(StepDump(folder, parse_steps(precision.data_dump_step)))
    if precision.survey_freq:
        found.append(_survey(precision.survey_freq, choice.policy.compute, tell))
    if choice.policy.exceptions:
        # Last, so that the dumps are written before it ends the run.
        found.append(Trap())
    return found


def _survey(every: int, compute: Format, tell: Tell) -> Survey:
    """A survey by the format computed in; in fp32, by the one that somebody might go to."""
    target = FP16 if compute is FP32 else compute
    limits = (1 - target.bias - target.mantissa_bits, 1 - target.bias, target.bias)
    return Survey(
        every, target, lambda step, layers: tell("survey", step=step, format=target.name, limits=limits, layers=layers)
    )
