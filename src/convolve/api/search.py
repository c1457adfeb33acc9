"""`find_lr`: choose a learning rate.

The arithmetic (Smith 2017): step i of n trains with the rate low (high / low)^(i / (n - 1)). The loss is
smoothed by an exponential average with decay 0.9 without bias. Training ends when it exceeds four times its minimum.
The suggestion is the rate at the steepest descent of the smoothed loss over the logarithm of the rate.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convolve.api.plots import Plot
from convolve.api.session import session, training
from convolve.api.training import check_data, complete_config, read_config
from convolve.api.user_code import LossLike, ModelLike, Source, read_user_code, take_objects
from convolve.config.schema import Config
from convolve.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from convolve.config.options import Options

DECAY = 0.9
DIVERGED = 4.0


@dataclass(frozen=True)
class LRCurve:
    """Loss over the learning rate. `suggestion` is the rate at the steepest descent."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    suggestion: float

    def plot(self) -> Plot:
        """Return the smoothed loss over the power of ten of the rate."""
        points = [(math.log10(rate), loss) for rate, loss in zip(self.rates, self.losses, strict=True)]
        first = points[0][0]
        shifted = [(power - first, loss) for power, loss in points]
        return Plot((("loss", (("smoothed loss", shifted),)),), across=f"powers of ten above {self.rates[0]:.2g}")

    def _repr_html_(self) -> str:
        return f"<div>suggested learning rate {self.suggestion:.3g}</div>{self.plot()._repr_html_()}"


def find_lr(
    data: Source | None = None,
    model: ModelLike | None = None,
    *,
    config: str | Path | Config | None = None,
    loss: LossLike | None = None,
    low: float = 1e-6,
    high: float = 1.0,
    steps: int = 100,
    **options: Unpack[Options],
) -> LRCurve:
    """Train some steps with a rising learning rate and suggest one. Leaves no folder, and the module as it was."""
    if not 0 < low < high or steps < 10:
        raise ConfigError(f"low={low:g}, high={high:g}, steps={steps}: need 0 < low < high and at least 10 steps")
    with session(), training():
        from dataclasses import replace

        from convolve.engine.user_code import NO_USER_CODE

        given: dict[str, Any] = dict(options)
        user = read_user_code(data, model, loss, (), base=take_objects(given, NO_USER_CODE))
        resolved = complete_config(read_config(data, model, config, given), user)
        check_data(resolved, user)
        if user.module is not None:
            user = replace(user, module=user.module.copy())
        rates = [low * (high / low) ** (index / (steps - 1)) for index in range(steps)]
        return _choose(rates, _measure(resolved, user, rates))


def _measure(config: Config, user: Any, rates: Sequence[float]) -> list[float]:
    """Return the loss of each step; fewer than rates if training diverges."""
    from dataclasses import replace

    from convolve import device
    from convolve.checkpoint.pretrained import adopt_weights, find_weights
    from convolve.distributed.collectives import SingleProcess
    from convolve.engine.build import build, build_initial_model, build_numerics, open_data, run_span
    from convolve.engine.step import train_step
    from convolve.loggers.base import SilentConsole
    from convolve.runs.teacher import add_teacher

    device.configure(config.run.threads)
    config = adopt_weights(config, SilentConsole())
    data = open_data(config, SilentConsole(), user)
    span, collectives = run_span(config, data), SingleProcess()
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder, user.in_use():
        numerics = build_numerics(config, data.device, span, folder=Path(folder))
        state, parts = build(
            config=config,
            data=data,
            collectives=collectives,
            numerics=numerics,
            model=build_initial_model(config, data, SilentConsole(), user, find_weights(config, SilentConsole())),
            user=user,
        )
        parts = add_teacher(config, data, parts)
        state.model.train()
        sizes = (config.optim.batch_size, config.global_batch_size)
        batches = data.train_loader().step_batches(config.run.seed, 0, *sizes)
        for rate, batch in zip(rates, batches, strict=False):
            train_step(state, batch, replace(parts, schedule=_Constant(rate)))
            losses.append(parts.metrics.compute().loss)
            if not math.isfinite(losses[-1]) or losses[-1] > DIVERGED * max(min(losses), 1e-12) + 1e-12:
                break
    return losses


@dataclass(frozen=True)
class _Constant:
    rate: float

    def __call__(self, samples: int) -> float:
        return self.rate


def _choose(rates: Sequence[float], losses: Sequence[float]) -> LRCurve:
    smooth, average = [], 0.0
    for count, loss in enumerate(losses, 1):
        if not math.isfinite(loss):
            break
        average = DECAY * average + (1 - DECAY) * loss
        smooth.append(average / (1 - DECAY**count))
    if len(smooth) < 3:
        raise ConfigError(f"find_lr: the loss diverged after {len(smooth)} steps; set low to less than {rates[0]:g}")
    slopes = [smooth[index + 1] - smooth[index - 1] for index in range(1, len(smooth) - 1)]
    best = slopes.index(min(slopes)) + 1
    return LRCurve(tuple(rates[: len(smooth)]), tuple(smooth), rates[best])
