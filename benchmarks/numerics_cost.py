"""Cost of emulated 16-bit arithmetic: step time relative to fp32, alternating in one process.

Usage: python benchmarks/numerics_cost.py [--steps N] [--threads N] [--only NAME]
Exits 1 if rounding to nearest costs more than 1.3 times, or stochastic rounding more than 1.6 times, the fp32 step
(medians), or half partials more than 3 times (best steps; fp32 with native layers, as in training).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from convolve import device
from turns import check_limit

LIMITS = {"nearest": 1.3, "stochastic": 1.6, "half-partials": 3.0, "half-partials-stochastic": 3.0}
ROUNDING = ("nearest", "stochastic")
HALF_PARTIALS = ("half-partials", "half-partials-stochastic")
NEAREST = {"precision": "16.32", "numerics": "emulated"}
STOCHASTIC = {"precision": "16.16", "numerics": "emulated"}
POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "nearest": NEAREST,
    "stochastic": STOCHASTIC,
    "half-partials": {**NEAREST, "enable_half_partials": True},
    "half-partials-stochastic": {**STOCHASTIC, "enable_half_partials": True},
}


class Case(NamedTuple):
    """A model with its input, and the policies that are compared with fp32."""

    model: str
    batch: int
    shape: tuple[int, int, int]
    classes: int
    policies: tuple[str, ...] = ROUNDING


CASES = {
    "resnet20-cifar": Case("resnet20-cifar", 128, (3, 32, 32), 10),
    "resnet18": Case("resnet18", 8, (3, 224, 224), 1000),
    "lenet-bn": Case("lenet-bn", 64, (1, 28, 28), 10),
    "resnet18-32": Case("resnet18", 128, (3, 32, 32), 1000, HALF_PARTIALS),
    "resnet18-32-small-batch": Case("resnet18", 32, (3, 32, 32), 1000, HALF_PARTIALS),
}


def build_steps(name: str) -> dict[str, Callable[[], object]]:
    import torch

    from convolve.config import ModelConfig, OptimConfig, PrecisionConfig
    from convolve.data.loader.loader import MicroBatch, StepBatch
    from convolve.engine.forward_backward import ForwardBackward, PassContext
    from convolve.engine.metrics import CrossEntropy
    from convolve.engine.state import TrainState
    from convolve.engine.step import StepParts, train_step
    from convolve.layers.native import use_native_layers
    from convolve.models import registry
    from convolve.numerics.loss_scaling import build_scaler
    from convolve.numerics.select import build_execution, select_numerics
    from convolve.optim.optimizers import build_optimizer

    case = CASES[name]
    size, shape, classes = case.batch, case.shape, case.classes
    torch.manual_seed(0)
    images = torch.randn(size, *shape).to(memory_format=torch.channels_last)
    batch = StepBatch((MicroBatch(images, torch.arange(size) % classes, 0),), size)
    cpu, steps = torch.device("cpu"), dict[str, Callable[[], object]]()
    for policy in ("fp32", *case.policies):
        options = ModelConfig(model=case.model)
        model = registry.build(case.model, classes=classes, input_shape=shape, seed=0, options=options)
        model = model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        if policy == "fp32" and case.policies == HALF_PARTIALS:
            use_native_layers(model)
        precision = PrecisionConfig(**POLICIES[policy])
        choice = select_numerics(precision, cpu)
        execution = build_execution(choice, cpu)
        execution.install(model)
        execution.round_initial_weights()
        optimizer = build_optimizer(model, OptimConfig(optimizer="momentum"))
        scaler = build_scaler(precision, choice.policy, (1, 1))
        state = TrainState(model, optimizer, execution=execution, scaler=scaler)
        parts = StepParts(
            schedule=lambda samples: 0.01,
            forward_backward=ForwardBackward(model=model, loss=CrossEntropy(), context=PassContext(0, execution)),
        )
        steps[policy] = partial(train_step, state, batch, parts)
    return steps


def measure(name: str, rounds: int) -> bool:
    steps = build_steps(name)
    walls: dict[str, list[float]] = {policy: [] for policy in steps}
    cpus: dict[str, list[float]] = {policy: [] for policy in steps}
    for number in range(rounds + 2):
        for policy, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            if number >= 2:
                walls[policy].append(time.perf_counter() - wall)
                cpus[policy].append(time.process_time() - cpu)
    medians = {policy: statistics.median(values) for policy, values in walls.items()}
    best = {policy: min(values) for policy, values in walls.items()}
    work = {policy: statistics.median(values) for policy, values in cpus.items()}
    passed = True
    for policy in CASES[name].policies:
        times, limit = best if policy in HALF_PARTIALS else medians, LIMITS[policy]
        ratio = times[policy] / times["fp32"]
        print(
            f"{name}: {policy} {1000 * times[policy]:.1f} ms, fp32 {1000 * times['fp32']:.1f} ms, "
            f"ratio of CPU time {work[policy] / work['fp32']:.2f}",
            flush=True,
        )
        passed &= check_limit(f"{name}: step time, {policy} / fp32", ratio, limit, "times")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", choices=CASES, nargs="+", default=["resnet20-cifar", "resnet18", "resnet18-32"])
    options = parser.parse_args()
    device.prepare()
    device.configure(options.threads)
    sys.exit(0 if all([measure(name, options.steps) for name in options.only]) else 1)


if __name__ == "__main__":
    main()
