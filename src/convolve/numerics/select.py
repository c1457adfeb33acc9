"""Choose how a policy is executed, plain, native or emulated, and give the reason in one line.

Native kernels for layers are applied here too, because they are allowed only in plain execution.
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from convolve import device
from convolve.config import Config
from convolve.config.training import PrecisionConfig
from convolve.errors import DeviceError
from convolve.kernels import rounding
from convolve.layers.native import explain_missing, use_native_layers
from convolve.numerics.emulator import Observer
from convolve.numerics.execution import AutocastExecution, EmulatedExecution, Execution, PlainExecution
from convolve.numerics.formats import FP32
from convolve.numerics.policy import Policy, build_policy

ExecutionMode = Literal["plain", "native", "emulated"]
DTYPE_NAMES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class NumericsChoice:
    """Execution mode of a policy, and the reason for it."""

    policy: Policy
    execution: ExecutionMode
    reason: str

    def __str__(self) -> str:
        return f"{self.policy.name}: {self.execution}, {self.reason}"


def select_numerics(config: PrecisionConfig, target: torch.device, *, watched: bool = False) -> NumericsChoice:
    """Choose the execution of a config on a device. Raises DeviceError if native is requested and impossible.

    Args:
        watched: True if observers need every result, which native kernels cannot provide.
    """
    policy = build_policy(config)
    if policy.compute is FP32:
        watched = watched or policy.exceptions
        reason = "every result is observed" if watched else "the device computes in fp32"
        return NumericsChoice(policy, "emulated" if watched else "plain", reason)
    if config.numerics == "emulated":
        return NumericsChoice(policy, "emulated", f"as requested, {rounding.describe()}")
    missing = _not_native(policy, watched)
    if config.numerics == "native":
        return _force_native(policy, missing, target)
    if policy.device_model is not None:
        reason = f"--device-model {policy.device_model.name} is emulated exactly; {rounding.describe()}"
        return NumericsChoice(policy, "emulated", reason)
    if missing:
        return NumericsChoice(
            policy, "emulated", f"no native kernel supports {', '.join(missing)}; {rounding.describe()}"
        )
    worthwhile, reason = _check_native(policy, target)
    if worthwhile:
        return NumericsChoice(policy, "native", reason + _explain_differences(policy))
    return NumericsChoice(policy, "emulated", f"{reason}; {rounding.describe()}")


def build_execution(choice: NumericsChoice, target: torch.device, observer: Observer | None = None) -> Execution:
    """Build the execution of a choice; only an emulated one has an observer."""
    if choice.execution == "plain":
        return PlainExecution()
    if choice.execution == "native":
        return AutocastExecution(choice.policy, target)
    return EmulatedExecution(choice.policy, observer)


def _not_native(policy: Policy, watched: bool) -> list[str]:
    """Return the features of a policy that native kernels do not support."""
    features = {
        "saturation": policy.saturate,
        "floating-point exceptions": policy.exceptions,
        "layers that stay in fp32": bool(policy.force_fp32),
        "norm statistics in 16 bits": policy.half_norm_statistics,
        "operation lists": policy.lists is not None,
        "dumps and surveys": watched,
    }
    return [name for name, used in features.items() if used]


def _explain_differences(policy: Policy) -> str:
    """Name what native kernels compute otherwise than the policy says; empty if they differ in nothing."""
    differences = ["half partials (sums are fp32)"] if policy.half_partials else []
    if policy.stochastic and policy.master is FP32:
        differences.append("stochastic rounding")
    elif policy.stochastic:
        differences.append("stochastic rounding of activations and gradients (that of weights is computed)")
    return f"; not emulated: {', '.join(differences)}" if differences else ""


def _force_native(policy: Policy, missing: list[str], target: torch.device) -> NumericsChoice:
    if missing:
        raise DeviceError(
            f"--numerics native: no native kernel supports {', '.join(missing)}; "
            "use --numerics emulated or drop these options"
        )
    if target.type == "cpu" and not _runs_natively(policy):
        raise DeviceError(
            f"--numerics native: {policy.compute.name} kernels do not work on this CPU; use --numerics emulated"
        )
    return NumericsChoice(policy, "native", "as requested" + _explain_differences(policy))


def _runs_natively(policy: Policy) -> bool:
    limited, dtype = device.ISA_LIMIT in os.environ, DTYPE_NAMES[policy.compute.name]
    return all(device.probe(operation, dtype, limited=limited).works for operation in ("matmul", "convolution"))


def _check_native(policy: Policy, target: torch.device) -> tuple[bool, str]:
    """Return whether native kernels work and are no slower than fp32, and the reason.

    Accelerators declare it. A CPU that has the instructions is measured in a child process.
    """
    name = policy.compute.name
    declared = device.has_16_bit_arithmetic(target, name)
    if declared is not None:
        return declared, f"{_name(target)} has {'' if declared else 'no '}{name} arithmetic"
    if not _runs_natively(policy):
        return False, f"{name} kernels do not work on this CPU"
    limited, dtypes = device.ISA_LIMIT in os.environ, (DTYPE_NAMES[name], "float32")
    for operation in ("convolution", "matmul"):
        half, full = (device.probe(operation, dtype, limited=limited).gflops for dtype in dtypes)
        if half < full:
            return False, f"{name} {operation} runs at {half / full:.2f} times the speed of fp32 on this CPU"
    return True, f"{name} kernels work and are no slower than fp32 on this CPU"


def _name(target: torch.device) -> str:
    return "this CPU" if target.type == "cpu" else target.type


def apply_kernels(config: Config, model: nn.Module, choice: NumericsChoice | None = None) -> list[str]:
    """Replace layers by native ones if the config allows it and execution is plain. Return their names.

    `choice` is the one for the device of the model, by default the one for a CPU.
    """
    choice = choice or select_numerics(config.precision, torch.device("cpu"))
    if config.run.kernels == "torch" or choice.execution != "plain":
        return []
    return use_native_layers(model)


def why_no_kernels(config: Config, model: nn.Module, choice: NumericsChoice, target: torch.device) -> str | None:
    """Return why native kernels are unavailable, or None if they are available or could not be used anyway."""
    if config.run.kernels == "torch" or choice.execution != "plain" or target.type != "cpu":
        return None
    return explain_missing(model)
