"""Measure the time of each block of a model on this CPU.

A forward and a backward pass of the whole model are timed: the clock is read between blocks, and when the gradient of a
block's input is computed. The loss counts for the last block, and fused blocks count for the first of them. Passes are
repeated for the given time, and the median of each block is returned. A batch that would take too long is measured with
fewer samples and scaled up; times grow slightly less than linearly with samples, so this overestimates.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from convolve import rng
from convolve.device import synchronize
from convolve.layers.chain import FusingLayer, run_chain
from convolve.models.network import Network

MIN_PASSES = 3


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one micro batch in one block."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Timing:
    """Times of all blocks, and the number of samples they were measured with."""

    blocks: tuple[BlockTime, ...]
    samples: int


def time_blocks(model: Network, samples: int, seconds: float) -> Timing:
    """Measure every block of a model on its device, for micro batches of `samples`, in about `seconds`."""
    model.train()
    _time_pass(model, 2)
    pair = sum(map(sum, _time_pass(model, 2)))
    fitting = int(2 * seconds / (pair * (MIN_PASSES + 1)))
    measured = max(2, min(samples, fitting))
    _time_pass(model, measured)
    passes, end = list[list[tuple[float, float]]](), time.perf_counter() + seconds
    while len(passes) < MIN_PASSES or time.perf_counter() < end:
        passes.append(_time_pass(model, measured))
    scale = samples / measured
    blocks = (
        BlockTime(*(scale * median(column) for column in zip(*rows, strict=True))) for rows in zip(*passes, strict=True)
    )
    return Timing(tuple(blocks), measured)


def _time_pass(model: Network, samples: int) -> list[tuple[float, float]]:
    """Return forward and backward seconds of each block in one pass."""
    device = next(model.parameters()).device
    x = torch.rand(samples, *model.input_shape).contiguous(memory_format=torch.channels_last).to(device)
    passes, arrived = _find_passes(model), dict[str, float]()
    times = [_finished(device)]
    for name, modules in passes.items():
        if x.requires_grad:
            x.register_hook(partial(_record, arrived, name))  # type: ignore[no-untyped-call]
        with rng.at(seed=0, step=0, first=0):
            x = run_chain(modules, x)
        times.append(_finished(device))
    loss = functional.cross_entropy(x, torch.zeros(samples, dtype=torch.int64, device=device))
    turned = _finished(device)
    times[-1] = turned
    torch.autograd.backward(loss)
    ended = _finished(device)
    forward = [after - before for before, after in zip(times, times[1:], strict=False)]
    backward = _spans(list(passes), arrived, (turned, ended))
    measured = dict(zip(passes, zip(forward, backward, strict=True), strict=True))
    return [measured.get(name, (0.0, 0.0)) for name in model.blocks]


def _find_passes(model: Network) -> dict[str, list[nn.Module]]:
    """Return what is timed together, by the first name: a group with a fusing layer, or one block."""
    passes: dict[str, list[nn.Module]] = {}
    for group in model.block_groups:
        first, modules = next(iter(group)), list(group.values())
        if isinstance(modules[0], FusingLayer):
            passes[first] = modules
        else:
            passes |= {name: [module] for name, module in group.items()}
    return passes


def _record(arrived: dict[str, float], name: str, gradient: Tensor) -> None:
    arrived[name] = _finished(gradient.device)


def _finished(device: torch.device) -> float:
    """Return the time at which the device has finished all queued work."""
    synchronize(device)
    return time.perf_counter()


def _spans(names: Sequence[str], arrived: dict[str, float], ends: tuple[float, float]) -> list[float]:
    """Return the seconds of each backward pass: from the gradient of a block's output to that of its input.

    The first trained block has no input gradient and ends with the whole pass; those before it take no time.
    """
    clock, ended = ends
    spans = list[float]()
    for name in reversed(names):
        moment = arrived.get(name, ended)
        spans.append(moment - clock)
        clock = moment
    return spans[::-1]


def time_update(update: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of a weight update, without the first one, which allocates the state."""
    update()
    taken, end = list[float](), time.perf_counter() + seconds
    while len(taken) < MIN_PASSES or time.perf_counter() < end:
        start = time.perf_counter()
        update()
        taken.append(time.perf_counter() - start)
    return median(taken)
