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
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convolve.api.plots import Plot
from convolve.api.progress import open_progress
from convolve.api.run import Run, Stopped
from convolve.api.run import open as open_run
from convolve.api.session import session
from convolve.api.training import plan_folder, read_config
from convolve.api.trials import Failure, Score, Trial, train_trials
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

END = math.inf
OF_SWEEP = ("run_dir", "log_dir", "resume", "threads")
"""Options of the whole sweep, which may differ when it continues."""


@dataclass(frozen=True)
class SweepResult:
    """The runs of a sweep, the best first, with the options in which they differ.

    `accuracies` are those of the best validation of each run, or mean average precisions if images have several labels;
    None if a run was not validated or diverged. With successive halving, runs that trained longer come first; `epochs`
    is how long each trained.
    """

    runs: tuple[Run, ...]
    options: tuple[Mapping[str, Any], ...]
    accuracies: tuple[float | None, ...]
    epochs: tuple[float, ...]
    folder: Path

    @property
    def best(self) -> Run:
        """The run with the highest accuracy, or mean average precision if images have several labels."""
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
            f"<tr><td>{escape(run.name)}</td><td>{escape(str(dict(given)))}</td><td>{epochs:g}</td>"
            f"<td>{'' if accuracy is None else f'{accuracy:.2%}'}</td></tr>"
            for run, given, accuracy, epochs in zip(self.runs, self.options, self.accuracies, self.epochs, strict=True)
        )
        heading = "<tr><th>run</th><th>options</th><th>epochs</th><th>accuracy</th></tr>"
        return f"<table>{heading}{rows}</table>{self.plot()._repr_html_()}"


class SweepOptions(Options, total=False):
    """The options of `convolve.sweep`: those of `train`, and its loss, metrics and progress."""

    loss: LossLike | None
    metrics: Sequence[MetricLike] | bool
    progress: bool | Console | None


def sweep(
    grid: Mapping[str, Sequence[Any]],
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
        grid: values of each option to vary, such as {"learning_rate": [0.01, 0.1]}.
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
        combinations = _combine(grid, model, draws, given)
        _check_counts(jobs=jobs, draws=draws, halving=halving)
        configs = _resolve(arguments, given, combinations)
        base = _check(configs, halving, grid)
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
            return _Sweep(folder, plan, _trials(folder, combinations, common), console).run(jobs)


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
    arguments: Mapping[str, Any], options: Mapping[str, Any], grid: Sequence[Mapping[str, Any]]
) -> list[Config]:
    """Return the config of each combination, so a wrong one is an error before anything is trained."""
    from convolve.engine.user_code import NO_USER_CODE

    data, model, config = (arguments[name] for name in ("data", "model", "config"))
    found = []
    for given in grid:
        merged: dict[str, Any] = {**options, **given}
        take_objects(merged, NO_USER_CODE)
        plan = plan_folder(data, merged, SilentConsole()) if model is None and config is None else None
        found.append(read_config(data, model, config, merged) if plan is None else plan.config)
    return found


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
            ranked = sorted(remaining, key=lambda trial: self._order(trial, until))
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
        reached = "" if until is END else f" after {until:g} epochs"
        return f"{trial}: {'not validated' if score is None else f'validation {score.value:.2%}'}{reached}"

    def _order(self, trial: Trial, until: float) -> tuple[float, float, int]:
        """Sort by the score, then by the number of the combination."""
        score = trial.score(until)
        value, loss = (-math.inf, -math.inf) if score is None else score.key
        return -value, -loss, trial.number

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
