"""Native or emulated: what a policy needs, what the machine has, and one line that says what was chosen and why.

The pieces that several verbs need: the data, the network, and a trained network from a checkpoint.

The numerics of a run: how its policy is carried out, who watches, and how the loss is scaled.

What the blocks of a config's network cost in memory and time, without its data, its devices or its weights.
"""

import os
from dataclasses import dataclass

import torch
from torch import nn

from convolve import device
from convolve.config import Config
from convolve.config.training import PrecisionConfig
from convolve.errors import DeviceError
from convolve.kernels import rounding
from convolve.kernels.binding import explain_absence
from convolve.layers.native import use_native_layers
from convolve.numerics.emulator import Observer
from convolve.numerics.execution import AutocastExecution, EmulatedExecution, Execution, PlainExecution
from convolve.numerics.formats import FP32
from convolve.numerics.policy import Policy, build_policy

DTYPE_NAMES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class NumericsChoice:
    """How a policy is carried out, and why that way."""

    policy: Policy
    execution: str
    reason: str

    def __str__(self) -> str:
        return f"{self.policy.name}: {self.execution}, {self.reason}"


def select_numerics(config: PrecisionConfig, where: torch.device, *, watched: bool = False) -> NumericsChoice:
    """Choose for a config; asking for native where it cannot be is an error that says why."""
    policy = build_policy(config)
    if policy.compute is FP32:
        watched = watched or policy.exceptions
        reason = "every result is looked at" if watched else "fp32 is what this device computes in"
        return NumericsChoice(policy, "emulated" if watched else "plain", reason)
    if config.numerics == "emulated":
        return NumericsChoice(policy, "emulated", f"as asked, {rounding.describe()}")
    missing = _beyond_native(policy, watched)
    if config.numerics == "native":
        return _force_native(policy, missing, where)
    if policy.stochastic:
        missing.append("stochastic rounding")
    if missing:
        return NumericsChoice(policy, "emulated", f"no native kernel does {', '.join(missing)}; {rounding.describe()}")
    works, reason = _decide(policy, where)
    return NumericsChoice(
        policy, "native" if works else "emulated", reason if works else f"{reason}; {rounding.describe()}"
    )


def build_execution(choice: NumericsChoice, where: torch.device, watcher: Observer | None = None) -> Execution:
    """The arithmetic that was chosen."""
    if choice.execution == "plain":
        return PlainExecution()
    if choice.execution == "native":
        return AutocastExecution(choice.policy, where)
    return EmulatedExecution(choice.policy, watcher)


def _beyond_native(policy: Policy, watched: bool) -> list[str]:
    wishes = {
        "half partials": policy.half_partials,
        "saturation": policy.saturate,
        "floating-point exceptions": policy.exceptions,
        "layers that stay in fp32": bool(policy.force_fp32),
        "norm statistics in 16 bits": policy.half_norm_statistics,
        "operation lists": policy.lists is not None,
        "dumps and surveys": watched,
    }
    return [name for name, wished in wishes.items() if wished]


def _force_native(policy: Policy, missing: list[str], where: torch.device) -> NumericsChoice:
    if missing:
        raise DeviceError(
            f"numerics=native: no native kernel does {', '.join(missing)}; use --numerics emulated or leave that out"
        )
    if where.type == "cpu" and not _runs_natively(policy):
        raise DeviceError(
            f"numerics=native: {policy.compute.name} kernels do not work on this CPU; use --numerics emulated"
        )
    reason = "as asked"
    if policy.stochastic:
        reason += "; computation rounds to nearest, only updates of weights round stochastically"
    return NumericsChoice(policy, "native", reason)


def _runs_natively(policy: Policy) -> bool:
    limited, kind = device.ISA_LIMIT in os.environ, DTYPE_NAMES[policy.compute.name]
    return all(device.probe(operation, kind, limited=limited).works for operation in ("matmul", "convolution"))


def _decide(policy: Policy, where: torch.device) -> tuple[bool, str]:
    """Whether native kernels work and are no slower than fp32, found by running them in a child process."""
    name = policy.compute.name
    if where.type != "cpu":
        return True, f"{where.type} has {name} kernels"
    if not _runs_natively(policy):
        return False, f"{name} kernels do not work on this CPU"
    limited, kind = device.ISA_LIMIT in os.environ, DTYPE_NAMES[name]
    for operation in ("convolution", "matmul"):
        half, full = (device.probe(operation, one, limited=limited).gflops for one in (kind, "float32"))
        if half < full:
            return False, f"{name} {operation} runs at {half / full:.2f} times the speed of fp32 on this CPU"
    return True, f"{name} kernels work and are no slower than fp32 on this CPU"


def use_kernels(config: Config, network: nn.Module, choice: NumericsChoice | None = None) -> list[str]:
    """Let native code compute layers where the config allows it and nobody looks at each result; returns names.

    `choice` is what was chosen for the network's device; without one, what would be for a CPU.
    """
    choice = choice or select_numerics(config.precision, torch.device("cpu"))
    if config.run.kernels == "torch" or choice.execution != "plain":
        return []
    return use_native_layers(network)


def explain_kernels(config: Config, choice: NumericsChoice, where: torch.device) -> str | None:
    """Why PyTorch computes layers that native code might have computed; None where it does not, or was asked to."""
    if config.run.kernels == "torch" or choice.execution != "plain" or where.type != "cpu":
        return None
    return explain_absence()
