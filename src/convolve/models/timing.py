"""How long each block of a network takes, measured on this CPU.

One forward and one backward pass of the whole network are timed as they run: a clock is read between blocks, and again
whenever the gradient of a block's input is there. The loss counts to the last block, and blocks that are done at once
to the first of them. A pass is repeated while the time allowed lasts, and each block's median is taken. A batch that
would take too long is measured with fewer samples, and the result scaled up; times grow with samples a little less than
evenly, so this errs on the slow side.
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
    """The times of all blocks, and with how many samples they were measured."""

    blocks: tuple[BlockTime, ...]
    samples: int


def time_blocks(network: Network, samples: int, seconds: float) -> Timing:
    """Measure every block of a network that is on the CPU, for micro batches of `samples`, in about `seconds`."""
    network.train()
    _time_pass(network, 2)
    pair = sum(map(sum, _time_pass(network, 2)))
    fitting = int(2 * seconds / (pair * (MIN_PASSES + 1)))
    measured = max(2, min(samples, fitting))
    _time_pass(network, measured)
    passes, end = list[list[tuple[float, float]]](), time.perf_counter() + seconds
    while len(passes) < MIN_PASSES or time.perf_counter() < end:
        passes.append(_time_pass(network, measured))
    scale = samples / measured
    blocks = (
        BlockTime(*(scale * median(column) for column in zip(*rows, strict=True))) for rows in zip(*passes, strict=True)
    )
    return Timing(tuple(blocks), measured)


def _time_pass(network: Network, samples: int) -> list[tuple[float, float]]:
    """Forward and backward seconds of each block in one pass."""
    x = torch.rand(samples, *network.input_shape).contiguous(memory_format=torch.channels_last)
    passes, arrived = _find_passes(network), dict[str, float]()
    began = [time.perf_counter()]
    for name, modules in passes.items():
        if x.requires_grad:
            x.register_hook(partial(_record, arrived, name))  # type: ignore[no-untyped-call]
        with rng.at(seed=0, step=0, first=0):
            x = run_chain(modules, x)
        began.append(time.perf_counter())
    loss = functional.cross_entropy(x, torch.zeros(samples, dtype=torch.int64))
    turned = time.perf_counter()
    began[-1] = turned
    torch.autograd.backward(loss)
    ended = time.perf_counter()
    forward = [after - before for before, after in zip(began, began[1:], strict=False)]
    backward = _spans(list(passes), arrived, (turned, ended))
    nothing = (0.0, 0.0)
    found = dict(zip(passes, zip(forward, backward, strict=True), strict=True))
    return [found.get(name, nothing) for name in network.blocks]


def _find_passes(network: Network) -> dict[str, list[nn.Module]]:
    """Return what is timed together, by the first name: a group with a fusing layer, or one block."""
    passes: dict[str, list[nn.Module]] = {}
    for group in network.block_groups:
        first, modules = next(iter(group)), list(group.values())
        if isinstance(modules[0], FusingLayer):
            passes[first] = modules
        else:
            passes |= {name: [module] for name, module in group.items()}
    return passes


def _record(arrived: dict[str, float], name: str, gradient: Tensor) -> None:
    arrived[name] = time.perf_counter()


def _spans(names: Sequence[str], arrived: dict[str, float], ends: tuple[float, float]) -> list[float]:
    """Seconds of each backward pass: from the arrival of the gradient behind a block to that of its input.

    The first block that learns has no gradient to hand on and ends with the whole pass; those before it have none.
    """
    clock, ended = ends
    spans = list[float]()
    for name in reversed(names):
        moment = arrived.get(name, ended)
        spans.append(moment - clock)
        clock = moment
    return spans[::-1]


def time_update(update: Callable[[], object], seconds: float) -> float:
    """The median time of a weight update in seconds; the first one, which makes the state, does not count."""
    update()
    taken, end = list[float](), time.perf_counter() + seconds
    while len(taken) < MIN_PASSES or time.perf_counter() < end:
        began = time.perf_counter()
        update()
        taken.append(time.perf_counter() - began)
    return median(taken)
