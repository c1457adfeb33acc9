"""Memory and time of each block of a model, without its data, devices or weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from convolve.compat.names import canonical_checkpoints
from convolve.config import Config, ModelConfig
from convolve.device import use_threads
from convolve.engine.build import build_options_on_meta, model_input
from convolve.models import registry
from convolve.models.network import Network, Shape, match_blocks
from convolve.models.summary import summarize
from convolve.models.timing import BlockTime, time_blocks, time_update
from convolve.numerics.policy import build_policy
from convolve.numerics.select import apply_kernels
from convolve.optim.optimizers import build_optimizer, count_moments
from convolve.planning.memory import BlockCost, StateBytes, Workload

FLOAT32_BYTES = 4
PROFILE_SECONDS = 1.5


@dataclass(frozen=True)
class Costs:
    """Seconds of a micro batch in each block, seconds of the update of one trained weight, and their source."""

    blocks: tuple[BlockTime, ...]
    update: float
    source: str

    def scaled(self, factor: float) -> "Costs":
        """Return the costs if `factor` processes share each core."""
        if factor == 1:
            return self
        blocks = tuple(BlockTime(factor * time.forward, factor * time.backward) for time in self.blocks)
        return Costs(blocks, factor * self.update, f"{self.source}, {factor:g} processes on each core")


def list_blocks(config: Config) -> tuple[BlockCost, ...]:
    """Return the cost of each block per sample."""
    return _list_blocks(config.model, *model_input(config))


@cache
def _list_blocks(options: ModelConfig, classes: int, shape: Shape) -> tuple[BlockCost, ...]:
    meta_model = build_options_on_meta(options, classes, shape)
    rows = summarize(options.model, meta_model).rows
    split_points = set(meta_model.split_points)
    inputs = [meta_model.input_shape, *(row.shape for row in rows)]
    trained = [
        sum(weight.numel() for weight in block.parameters() if weight.requires_grad)
        for block in meta_model.blocks.values()
    ]
    return tuple(
        BlockCost(
            name=row.name,
            parameters=row.parameters,
            trained=weights,
            multiply_adds=row.multiply_adds,
            input_values=prod(shape),
            kept_values=row.activation_bytes // FLOAT32_BYTES,
            split_point=row.name in split_points,
        )
        for row, shape, weights in zip(rows, inputs, trained, strict=False)
    )


def state_bytes(config: Config) -> StateBytes:
    """Return the bytes of weights, activations and optimizer state in a run."""
    policy = build_policy(config.precision)
    first, second = count_moments(config.optim)
    return StateBytes(
        weight_bytes=policy.master.bits // 8,
        compute_bytes=policy.compute.bits // 8,
        first_moments=first,
        second_moments=second,
        averages=int(config.optim.ema_decay is not None),
        sharers=config.parallel.replicas if config.parallel.rts else 1,
    )


def workload(config: Config, blocks: Sequence[BlockCost]) -> Workload:
    """Return the micro batch of a run, and the blocks after which recomputation keeps activations."""
    if not config.parallel.enable_recomputation:
        return Workload(config.optim.batch_size)
    names = [block.name for block in blocks]
    patterns = canonical_checkpoints(config.parallel.recompute_checkpoints, names) or ("*",)
    return Workload(config.optim.batch_size, match_blocks(names, patterns))


def calculate_costs(config: Config, blocks: Sequence[BlockCost], flops: float) -> Costs:
    """Return the costs on a device that computes `flops` operations per second, two for each multiply-add.

    A backward pass costs two forward passes, one for the gradient of the weights and one for that of the input. The
    first block with trained weights does not need the latter. Updates cost nothing.
    """
    times, needs_input_gradient = list[BlockTime](), False
    for block in blocks:
        forward = 2 * block.multiply_adds * config.optim.batch_size / flops
        times.append(BlockTime(forward, forward * (2 if needs_input_gradient else bool(block.trained))))
        needs_input_gradient = needs_input_gradient or bool(block.trained)
    return Costs(tuple(times), 0.0, f"calculated for a device with {flops / 1e12:g} Tflop/s, updates not counted")


def measure_costs(config: Config, meta_model: Network, threads: int) -> Costs:
    """Measure the costs on this CPU in fp32 for a second or two."""
    samples = config.optim.batch_size
    model = registry.find(config.model.model).materialize(meta_model, config.run.seed)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    apply_kernels(config, model)
    optimizer = build_optimizer(model, config.resolved_optim())
    with use_threads(threads):
        timing = time_blocks(model, samples, PROFILE_SECONDS)
        update = time_update(optimizer.step, PROFILE_SECONDS / 10)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    fewer = f" with {timing.samples} samples and scaled to {samples}" if timing.samples < samples else ""
    return Costs(timing.blocks, update / trained, f"measured on this CPU in fp32, {threads} threads{fewer}")
