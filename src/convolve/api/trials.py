"""Trials of a sweep: each trains one combination of options in its folder, in this process or in several others.

A trial pauses at the validation of an epoch and resumes from its checkpoint, with the bits of a run without pause. Its
score is read from validation.csv, so it does not matter which process trained it, or how often it was killed.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convolve.api.callbacks import Callback
from convolve.api.ranks import encode, take_result
from convolve.api.run import Run
from convolve.api.user_code import OBJECTS
from convolve.config.selection import SelectBy, rank
from convolve.distributed.launch.local import LAUNCHER_VARIABLE
from convolve.errors import DivergedError, NumericsError
from convolve.interpreter import module_command
from convolve.loggers.base import SilentConsole, ValidationRecord
from convolve.run_files import CONFIG_FILE

if TYPE_CHECKING:
    from convolve.recipes.photos import PhotoPlan

_POLL_SECONDS = 0.05
_TOLERANCE = 1e-9
Failure = DivergedError | NumericsError
"""Ends a trial, but not the sweep."""


@dataclass(frozen=True)
class Score:
    """Best validation of a trial so far: `value` is the accuracy, or the mean average precision with several labels."""

    value: float
    loss: float
    epoch: float
    select_by: SelectBy = "accuracy"

    @property
    def key(self) -> tuple[float, float]:
        """Larger is better."""
        return rank(self.value, self.loss, self.select_by)


NO_SCORE = Score(-math.inf, math.inf, 0.0)


@dataclass(frozen=True)
class Trial:
    """One combination: arguments of `train`, the folder of its run, and the plan of the recipe for photos."""

    number: int
    folder: Path
    given: Mapping[str, Any]
    arguments: Mapping[str, Any]
    plan: PhotoPlan | None = None

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.given.items())

    def reached(self, until: float) -> bool:
        """Return whether the trial is complete, or was validated at an epoch or later."""
        return Run(self.folder).finished or any(
            score.epoch > until - _TOLERANCE for score in read_scores(Run(self.folder))
        )

    @property
    def epochs(self) -> float:
        """How long the trial was trained."""
        return max((record.epoch for record in Run(self.folder).training), default=0.0)

    def score(self, until: float) -> Score | None:
        """Return the best validation up to the first one at an epoch or later, None without one."""
        return max(self._scores(until), key=lambda score: score.key, default=None)

    def order(self, until: float) -> tuple[float, ...]:
        """Return a key to sort trials, the best first: by the score, then by the best validation after the first step.

        A classifier that was fitted before the first step may have the best score of several trials.
        """
        scores = self._scores(until)
        best, trained = (
            max(found, key=lambda score: score.key, default=NO_SCORE)
            for found in (scores, [score for score in scores if score.epoch > 0])
        )
        return -best.value, *(-value for value in (*trained.key, *best.key)), self.number

    def _scores(self, until: float) -> list[Score]:
        scores = read_scores(Run(self.folder))
        last = min((score.epoch for score in scores if score.epoch > until - _TOLERANCE), default=math.inf)
        return [score for score in scores if score.epoch <= last and math.isfinite(score.value)]


def read_scores(run: Run) -> list[Score]:
    """Return the validations of a run that can select its best checkpoint."""
    if not (run.path / CONFIG_FILE).is_file():
        return []
    averaged, select_by = run.config.run.select_ema, run.config.run.select_by
    records = [record for record in run.validations if averaged or not record.checkpoint.endswith("-ema")]
    return [Score(_value(record), record.loss, record.epoch, select_by) for record in records]


def _value(record: ValidationRecord) -> float:
    found = record.mean_average_precision
    return record.accuracy if found is None else found


@dataclass(frozen=True)
class Training:
    """Train a trial until an epoch, or to its end; `work` may run in another process."""

    trial: Trial
    until: float

    def work(self) -> None:
        """Start or resume the run."""
        from convolve.api.training import train, train_plan

        pause = () if math.isinf(self.until) else (_PauseAt(self.until),)
        arguments: dict[str, Any] = dict(self.trial.arguments)
        plan, folder = self.trial.plan, self.trial.folder
        if plan is None:
            train(**arguments, callbacks=pause, progress=False, run_dir=folder, resume=True)
            return
        config = plan.config.replace(run_dir=folder, resume=True, threads=arguments["threads"])
        plan = replace(plan, config=config)
        objects = {name: arguments[name] for name in OBJECTS if name in arguments}
        code = {"loss": arguments["loss"], "metrics": arguments.get("metrics", ())}
        train_plan(plan, pause, SilentConsole(), **code, objects=objects)


class _PauseAt(Callback):
    """Stops a run after the step that reaches an epoch and was validated."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._run: Run | None = None

    def on_start(self, run: Run) -> None:
        self._run = run

    def on_validation(self, record: ValidationRecord) -> None:
        if self._run is not None and record.epoch > self._until - _TOLERANCE:
            self._run.stop(f"epoch {self._until:g} of a sweep")


def train_trials(trials: Sequence[Trial], until: float, jobs: int) -> Iterator[tuple[Trial, Failure | None]]:
    """Train trials until an epoch, `jobs` at a time in other processes, and yield each one that ends."""
    works = [Training(trial, until) for trial in trials]
    yield from _train_here(works) if jobs == 1 else _train_in_processes(works, jobs)


def _train_here(works: Iterable[Training]) -> Iterator[tuple[Trial, Failure | None]]:
    for training in works:
        try:
            training.work()
        except (DivergedError, NumericsError) as error:
            yield training.trial, error
        else:
            yield training.trial, None


def _train_in_processes(works: Iterable[Training], jobs: int) -> Iterator[tuple[Trial, Failure | None]]:
    waiting, running = list(works), list[_Process]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Process(waiting.pop(0)))
            for process in [process for process in running if process.ended]:
                running.remove(process)
                yield process.training.trial, process.take_failure()
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running:
            process.stop()


class _Process:
    """A process that trains one trial. It ends with this one, and saves a checkpoint if it is asked to stop."""

    def __init__(self, training: Training) -> None:
        self.training = training
        job = encode(training, "--jobs")
        self._stack = ExitStack()
        self._file = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="convolve-"))) / "job"
        self._file.write_bytes(job)
        self._process = subprocess.Popen(
            module_command("convolve.api.ranks", str(self._file)),
            env={**os.environ, LAUNCHER_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )

    @property
    def ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def take_failure(self) -> Failure | None:
        """Return why the trial of an ended process failed, None if it did not; raise any other error."""
        with self._stack:
            try:
                take_result(self._file, "jobs", self._process.returncode)
            except (DivergedError, NumericsError) as error:
                return error
            return None

    def stop(self) -> None:
        """Ask the process to save and end, and wait for it."""
        with self._stack:
            self._process.terminate()
            self._process.wait()
