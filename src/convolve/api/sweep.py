"""`sweep`: compare combinations of options, all of them to the end or by successive halving.

Successive halving (Jamieson and Talwalkar 2016) by a factor k: n combinations train for E k^-r epochs, the best n / k
of them for E k^-(r-1), and so on; those that remain train for all E epochs. r is the number of times that n can be
divided by k, or less, so that the first part is no shorter than the interval between validations. The schedule of each
run is that of E epochs, and a run that continues has the bits of one that was never paused.

The plan is stored in sweep.json, and everything else in the run folders, so a killed sweep continues with the same
ranking.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convolve.api.plots import Plot
from convolve.api.progress import open_progress
from convolve.api.run import Run, Stopped
from convolve.api.run import open as open_run
from convolve.api.session import session
from convolve.api.training import plan_folder, read_config
from convolve.api.trials import Failure, Score, Trial, read_scores, train_trials
from convolve.api.user_code import OBJECTS, LossLike, MetricLike, ModelLike, Source, take_objects
from convolve.config.options import Options
from convolve.config.schema import Config
from convolve.errors import ConfigError, describe, to_one_line
from convolve.files import read_run_file, write_file
from convolve.loggers.base import Console, SilentConsole, to_json
from convolve.run_files import SWEEP_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Unpack

    from convolve.recipes.photos import PhotoPlan

END = math.inf
RATE_FACTORS = (0.3, 1.0, 3.0)
OF_SWEEP = ("run_dir", "log_dir", "resume", "threads")
"""Options of the whole sweep, which may differ when it continues."""


@dataclass(frozen=True)
class SweepResult:
    """The runs of a sweep, the best first, with the options in which they differ.

    `accuracies` are those of the best validation of each run, or mean average precisions if images have several labels;
    None if a run was not validated or diverged. Equal ones, such as that of a classifier fitted before the first step,
    are ordered by the best validation after it. With successive halving, runs that trained longer come first; `epochs`
    is how long each trained, and `best_epochs` when it was best.
    """

    runs: tuple[Run, ...]
    options: tuple[Mapping[str, Any], ...]
    accuracies: tuple[float | None, ...]
    epochs: tuple[float, ...]
    best_epochs: tuple[float | None, ...]
    folder: Path

    @property
    def best(self) -> Run:
        """The run with the highest accuracy, or mean average precision if images have several labels."""
        return self.runs[0]

    def plot(self) -> Plot:
        """Return validation accuracy and training loss of all runs."""
        names = [", ".join(f"{name}={value}" for name, value in given.items()) for given in self.options]
        scores = [_best_by_epoch(read_scores(run)) for run in self.runs]
        losses = [
            [(record.epoch, record.loss) for record in run.training if record.loss is not None] for run in self.runs
        ]
        panels = (("validation accuracy", scores), ("training loss", losses))
        return Plot(tuple((panel, tuple(zip(names, curves, strict=True))) for panel, curves in panels if any(curves)))

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(run.name)}</td><td>{escape(str(dict(given)))}</td><td>{epochs:g}</td>"
            f"<td>{'' if accuracy is None else f'{accuracy:.2%}'}</td></tr>"
            for run, given, accuracy, epochs in zip(self.runs, self.options, self.accuracies, self.epochs, strict=True)
        )
        heading = "<tr><th>run</th><th>options</th><th>epochs</th><th>accuracy</th></tr>"
        return f"<table>{heading}{rows}</table>{self.plot()._repr_html_()}"


def _best_by_epoch(scores: Sequence[Score]) -> list[tuple[float, float]]:
    found: dict[float, float] = {}
    for score in scores:
        found[score.epoch] = max(score.value, found.get(score.epoch, score.value))
    return list(found.items())


class SweepOptions(Options, total=False):
    """The options of `convolve.sweep`: those of `train`, and its loss, metrics and progress."""

    loss: LossLike | None
    metrics: Sequence[MetricLike] | bool
    progress: bool | Console | None


def sweep(
    grid: Mapping[str, Sequence[Any]] | None = None,
    data: Source | None = None,
    model: ModelLike | None = None,
    *,
    config: str | Path | Config | None = None,
    jobs: int = 1,
    draws: int | None = None,
    halving: int | None = None,
    **options: Unpack[SweepOptions],
) -> SweepResult:
    """Train once for each combination of option values, and return the runs, the best first.

    The folder of the sweep is `run_dir`, by default a new one in `log_dir`. With `run_dir` and `resume=True`, a sweep
    that was interrupted continues, and has the same ranking as one that was not.

    Args:
        grid: values of each option to vary, such as {"learning_rate": [0.01, 0.1]}; by default three learning rates
            around that of the options, the config or the recipe.
        jobs: runs at a time, each in a process with its part of the CPU threads.
        draws: train only this many combinations, drawn by the seed.
        halving: successive halving by this factor, such as 3: train all combinations for a short part of the epochs,
            continue the best third of them for three times as long, and so on.
    """
    given: dict[str, Any] = dict(options)
    with session(), open_progress(given.pop("progress", None)) as console:
        arguments = {"data": data, "model": model, "config": config, "loss": given.pop("loss", None)}
        if not isinstance(given.get("metrics", ()), bool):
            arguments["metrics"] = given.pop("metrics", ())
        _check_counts(jobs=jobs, draws=draws, halving=halving)
        if grid is None:
            grid = _learning_rates(arguments, given)
        combinations = _combine(grid, model, draws, given)
        resolved = _resolve(arguments, given, combinations, console)
        base = _check(list(map(_config, resolved)), halving, grid)
        plan = {
            "combinations": [_stored(combination) for combination in combinations],
            "pauses": pauses(len(combinations), base, halving) if halving else [],
            "factor": halving or 1,
            "options": _stored({**given, **arguments, "metrics": None}),
            "threads": base.run.threads or (_threads(jobs) if jobs > 1 else None),
        }
        with _open_folder(base, plan) as folder:
            own = {name: value for name, value in given.items() if name not in OF_SWEEP}
            common = {**arguments, **own, "threads": plan["threads"]}
            trials = [
                replace(trial, plan=None if isinstance(one, Config) else one)
                for trial, one in zip(_trials(folder, combinations, common), resolved, strict=True)
            ]
            return _Sweep(folder, plan, trials, console).run(jobs)


def _learning_rates(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, list[float]]:
    (resolved,) = _resolve(arguments, options, [{}], SilentConsole())
    peak = _config(resolved).resolved_optim().learning_rate
    return {"learning_rate": [float(f"{factor * peak:.2g}") for factor in RATE_FACTORS]}


def _combine(
    grid: Mapping[str, Sequence[Any]], model: ModelLike | None, draws: int | None, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    from torch import nn

    if not grid or not all(grid.values()):
        raise ConfigError("sweep: the grid is empty; give values such as {'learning_rate': [0.01, 0.1]}")
    if isinstance(model, nn.Module):
        raise ConfigError("sweep: a module would be trained repeatedly; give its class, or a function that makes it")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if draws is None:
        return combinations
    from convolve.rng import epoch_permutation

    order = epoch_permutation(int(options.get("seed", 0)), 0, len(combinations))
    return [combinations[index] for index in order[:draws].tolist()]


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        least = 2 if name == "halving" else 1
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: must be at least {least}")


def _resolve(
    arguments: Mapping[str, Any], options: Mapping[str, Any], grid: Sequence[Mapping[str, Any]], console: Console
) -> list[Config | PhotoPlan]:
    """Return the config or the plan for photos of each combination, so a wrong one is an error before training.

    The console shows the plan of the first one.
    """
    from convolve.engine.user_code import NO_USER_CODE

    data, model, config = (arguments[name] for name in ("data", "model", "config"))
    named = {"model": model} if isinstance(model, str) else {}
    found: list[Config | PhotoPlan] = []
    for given in grid:
        merged: dict[str, Any] = {**options, **named, **given}
        take_objects(merged, NO_USER_CODE)
        shown = SilentConsole() if found else console
        plan = plan_folder(data, merged, shown) if config is None and (model is None or named) else None
        found.append(plan or read_config(data, None if named else model, config, merged))
    return found


def _config(resolved: Config | PhotoPlan) -> Config:
    return resolved if isinstance(resolved, Config) else resolved.config


def _check(configs: Sequence[Config], halving: int | None, grid: Mapping[str, object]) -> Config:
    """Return the first config; reject what a sweep cannot do."""
    first = configs[0]
    for name in OF_SWEEP:
        if name in grid:
            raise ConfigError(f"--grid {name}: is that of the whole sweep; omit it from the grid")
    for config in configs:
        if config.optim.minutes is not None:
            raise ConfigError(f"--minutes {config.optim.minutes:g}: a sweep compares equal lengths; give --epochs")
        if not config.log.logs:
            raise ConfigError("--no-logs: a sweep compares the validations in the logs; omit it")
    if halving is None:
        return first
    for config in configs:
        if config.optim.iterations is not None or config.optim.epochs != first.optim.epochs:
            raise ConfigError(f"--halving {halving}: needs runs of the same number of --epochs")
        if config.run.validation_mode != "during" or not config.run.checkpoints:
            raise ConfigError(f"--halving {halving}: needs validation during training and checkpoints; enable both")
    return first


def pauses(combinations: int, config: Config, factor: int) -> list[float]:
    """Return the epochs, multiples of the interval between validations, after which only some combinations continue."""
    from convolve.engine.loop import DEFAULT_EPOCHS

    total = DEFAULT_EPOCHS if config.optim.epochs is None else config.optim.epochs
    every = config.run.validation_frequency
    times = round(math.log(combinations, factor), 9)
    found = {every * round(total * factor**-power / every) for power in range(1, math.floor(times) + 1)}
    epochs = sorted(epoch for epoch in found if 0 < epoch < total)
    if not epochs and combinations > 1:
        raise ConfigError(
            f"--halving {factor}: runs of {total:g} epochs, validated every {every:g}, are too short for "
            f"{combinations} combinations; give more --epochs, or --validation-frequency"
        )
    return epochs


def _threads(jobs: int) -> int:
    from convolve.device import available_threads

    return max(1, available_threads() // jobs)


def _stored(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what sweep.json stores of arguments, to compare; of objects, their names."""

    def name(value: Any) -> Any:
        if isinstance(value, Config):
            return _stored(value.values())
        return getattr(value, "__qualname__", type(value).__qualname__) if hasattr(value, "__module__") else value

    return {key: to_json(name(value)) for key, value in arguments.items() if key not in OF_SWEEP and value is not None}


@contextmanager
def _open_folder(config: Config, plan: dict[str, Any]) -> Iterator[Path]:
    """Create and lock the folder of a sweep, or that of the one to resume; `plan` gets the stored number of threads."""
    from convolve.distributed.collectives import SingleProcess
    from convolve.runs.folder import create_run_dir, lock_run

    folder, compared = config.run.run_dir, ("combinations", "pauses", "factor", "options")
    started = config.run.resume and folder is not None and (folder / SWEEP_FILE).is_file()
    if not started:
        folder = create_run_dir(config.run, f"{config.name}-sweep")
    assert folder is not None, "created above"
    with lock_run(folder, SingleProcess()):
        if started:
            stored = _read_plan(folder)
            changed = [name for name in compared if stored.get(name) != json.loads(json.dumps(plan[name]))]
            if changed:
                raise ConfigError(
                    f"--run-dir {folder}: its sweep has other {' and '.join(changed)}; use those, or another folder"
                )
            plan["threads"] = stored.get("threads")
        else:
            write_file(folder / SWEEP_FILE, json.dumps(plan, indent=1).encode())
        yield folder.absolute()


def _read_plan(folder: Path) -> dict[str, Any]:
    try:
        plan = json.loads(read_run_file(folder / SWEEP_FILE))
        if isinstance(plan, dict):
            return plan
        problem = "not an object"
    except (OSError, ValueError, RecursionError) as error:
        problem = describe(error)
    raise ConfigError(f"{folder / SWEEP_FILE}: cannot be read ({problem}); use another folder")


def _trials(folder: Path, combinations: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[Trial]:
    """Return the trials of combinations; the folder of each has its number and its options as name."""
    width, trials = len(str(len(combinations))), []
    for number, given in enumerate(combinations, 1):
        words = "-".join(f"{name}={value}" for name, value in _stored(given).items())
        name = f"{number:0{width}d}-" + re.sub(r"[^\w.+=@-]+", "-", words)[:80]
        trials.append(Trial(number, folder / name, given, {**arguments, **given}))
    return trials


class _Sweep:
    """A sweep in its folder."""

    def __init__(self, folder: Path, plan: Mapping[str, Any], trials: Sequence[Trial], console: Console) -> None:
        self._folder, self._plan, self._trials, self._console = folder, plan, trials, console
        self._reached: dict[int, float] = {}

    def run(self, jobs: int) -> SweepResult:
        """Train what is not trained yet, and return the runs, the best first."""
        remaining, dropped = list(self._trials), list[Trial]()
        self._console.info(f"sweep of {len(remaining)} combinations in {self._folder}")
        for until in (*self._plan["pauses"], END):
            self._train(remaining, until, jobs)
            ranked = sorted(remaining, key=lambda trial: trial.order(until))
            kept = len(ranked) if until is END else max(1, len(ranked) // self._plan["factor"])
            remaining, dropped = ranked[:kept], [*ranked[kept:], *dropped]
        return self._finish([*remaining, *dropped])

    def _train(self, trials: Sequence[Trial], until: float, jobs: int) -> None:
        due = [trial for trial in trials if not trial.reached(until)]
        done = len(trials) - len(due)
        try:
            for trial, failure in train_trials(due, until, jobs):
                done += 1
                self._console.info(f"{done} of {len(trials)}: {self._line(trial, until, failure)}")
        except Stopped:
            self._console.info(f"stopped; continue with the same options, --run-dir {self._folder} and --resume")
            raise
        self._reached.update({trial.number: until for trial in trials})

    def _line(self, trial: Trial, until: float, failure: Failure | None) -> str:
        if failure is not None:
            return f"{trial}: {to_one_line(failure)}"
        score = trial.score(until)
        reached = "" if until is END else f", paused at epoch {until:g}"
        found = "not validated" if score is None else f"validation {score.value:.2%} at epoch {score.epoch:g}"
        return f"{trial}: {found}{reached}"

    def _finish(self, trials: Sequence[Trial]) -> SweepResult:
        scores = [trial.score(self._reached[trial.number]) for trial in trials]
        epochs = [min(self._reached[trial.number], trial.epochs) for trial in trials]
        ranking = [_row(*row) for row in zip(trials, scores, epochs, strict=True)]
        write_file(self._folder / SWEEP_FILE, json.dumps({**self._plan, "ranking": ranking}, indent=1).encode())
        return SweepResult(
            tuple(self._open(trial) for trial in trials),
            tuple(trial.given for trial in trials),
            tuple(None if score is None else score.value for score in scores),
            tuple(epochs),
            tuple(None if score is None else score.epoch for score in scores),
            self._folder,
        )

    def _open(self, trial: Trial) -> Run:
        """Return the run with the objects of the user's code."""
        names = ("data", "model", "loss", *OBJECTS)
        objects: dict[str, Any] = {
            name: value for name in names if not isinstance(value := trial.arguments.get(name), str | Path)
        }
        return open_run(trial.folder, **objects)


def _row(trial: Trial, score: Score | None, epochs: float) -> dict[str, Any]:
    accuracy = None if score is None else score.value
    return {"run": trial.folder.name, "options": _stored(trial.given), "accuracy": accuracy, "epochs": epochs}
