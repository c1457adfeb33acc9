"""`find_lr` and `sweep`: choose a learning rate, and compare options.

The arithmetic of `find_lr` (Smith 2017): step i of n trains with the rate low (high / low)^(i / (n - 1)). The loss is
smoothed by an exponential average with decay 0.9 without bias. Training ends when it exceeds four times its minimum.
The suggestion is the rate at the steepest descent of the smoothed loss over the logarithm of the rate.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convolve.api.plots import Plot
from convolve.api.run import Run
from convolve.api.session import session, training
from convolve.api.training import check_data, complete_config, read_config, train
from convolve.api.user_code import LossLike, ModelLike, Source, read_user_code, take_objects
from convolve.config.schema import Config
from convolve.errors import ConfigError
from convolve.label_scores import MEAN_AVERAGE_PRECISION

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
    from convolve.distributed.collectives import SingleProcess
    from convolve.engine.build import build, build_initial_model, build_numerics, open_data, run_span
    from convolve.engine.step import train_step
    from convolve.loggers.base import SilentConsole

    device.configure(config.run.threads)
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
            model=build_initial_model(config, data, SilentConsole(), user),
            user=user,
        )
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


@dataclass(frozen=True)
class SweepResult:
    """The runs of a sweep, the best first, with the options in which they differ.

    `accuracies` are those on the test images, or mean average precisions if images have several labels.
    """

    runs: tuple[Run, ...]
    options: tuple[Mapping[str, Any], ...]
    accuracies: tuple[float | None, ...]

    @property
    def best(self) -> Run:
        """The run with the highest test accuracy, or mean average precision if images have several labels."""
        return self.runs[0]

    def plot(self) -> Plot:
        """Return the training loss of all runs."""
        names = [", ".join(f"{name}={value}" for name, value in given.items()) for given in self.options]
        curves = tuple(
            (name, [(record.epoch, record.loss) for record in run.training if record.loss is not None])
            for name, run in zip(names, self.runs, strict=True)
        )
        return Plot((("training loss", curves),))

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(run.name)}</td><td>{escape(str(dict(given)))}</td>"
            f"<td>{'' if accuracy is None else f'{accuracy:.2%}'}</td></tr>"
            for run, given, accuracy in zip(self.runs, self.options, self.accuracies, strict=True)
        )
        return f"<table><tr><th>run</th><th>options</th><th>accuracy</th></tr>{rows}</table>{self.plot()._repr_html_()}"


def sweep(
    grid: Mapping[str, Sequence[Any]],
    data: Source | None = None,
    model: ModelLike | None = None,
    *,
    config: str | Path | Config | None = None,
    loss: LossLike | None = None,
    draws: int | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> SweepResult:
    """Train once for each combination of option values, and return the runs, the best first.

    Args:
        grid: values of each option to vary, such as {"learning_rate": [0.01, 0.1]}.
        draws: train only this many combinations, drawn by the seed.
    """
    from torch import nn

    if not grid or not all(grid.values()):
        raise ConfigError("sweep: the grid is empty; give values such as {'learning_rate': [0.01, 0.1]}")
    if isinstance(model, nn.Module):
        raise ConfigError("sweep: a module would be trained repeatedly; give its class, or a function that makes it")
    if options.get("run_dir") is not None and math.prod(map(len, grid.values())) > 1:
        raise ConfigError(f"--run-dir {options['run_dir']}: a sweep makes several run folders; give --log-dir FOLDER")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if draws is not None:
        from convolve.rng import epoch_permutation

        order = epoch_permutation(options.get("seed", 0), 0, len(combinations))
        combinations = [combinations[index] for index in order[:draws].tolist()]
    found = []
    for given in combinations:
        merged: Any = {**options, **given}
        run = train(data, model, config=config, loss=loss, progress=progress, **merged)
        accuracy = (run.metrics.get("metrics") or {}).get(MEAN_AVERAGE_PRECISION, run.metrics.get("test_accuracy"))
        found.append((run, given, accuracy))
    found.sort(key=lambda item: -1.0 if item[2] is None else item[2], reverse=True)
    return SweepResult(*(tuple(column) for column in zip(*found, strict=True)))
