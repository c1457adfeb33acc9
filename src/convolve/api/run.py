"""A run as a folder, and `Run` as its handle: resume, validate, load, export, average, report, plot, stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from convolve.api.plots import Plot, plot_run
from convolve.api.progress import open_progress
from convolve.api.records import Checkpoint, read_events, read_json
from convolve.api.session import session
from convolve.config.loading import read_saved
from convolve.config.schema import Config
from convolve.errors import CheckpointError, ConfigError, suggest
from convolve.loggers.base import Console, TrainRecord, ValidationRecord
from convolve.loggers.files import read_training, read_validations
from convolve.run_files import (
    AVERAGES_FOLDER,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    EVENTS_FILE,
    MANIFEST_FILE,
    SUMMARY_FILE,
    step_of,
)

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from convolve.api.callbacks import CallbackLike
    from convolve.api.classifier import Classifier
    from convolve.api.user_code import AugmentLike, LossLike, MetricLike, ModelLike, OptimizerLike, Source
    from convolve.config.options import ResumeOptions
    from convolve.engine.user_code import UserCode
    from convolve.export.export import ExportReport
    from convolve.runs.average import AverageReport
    from convolve.runs.report import ReportResult
    from convolve.runs.results import TrainReport

Formats = Literal["onnx", "openvino", "litert", "coreml", "pt2", "aoti", "safetensors"]
Engines = Literal["auto", "torch", "onnxruntime", "openvino", "aoti"]
Averages = Literal["mean", "exponential", "ema"]
Statistics = Literal["measured", "averaged"]


class Stopped(KeyboardInterrupt):
    """A signal, such as Ctrl-C, stopped a run after a step. A checkpoint was saved, and `run` can be resumed."""

    def __init__(self, run: Run, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}; resume with convolve.open({str(run.path)!r}).resume()")
        self.run = run
        self.signal = number

    def __reduce__(self) -> tuple[type[Stopped], tuple[Run, signal.Signals]]:
        return type(self), (self.run, self.signal)

    def _render_traceback_(self) -> list[str]:
        """Return the one line that a notebook shows."""
        return [f"Stopped: {self}"]


class Run:
    """Handle of a run folder. Everything is read when it is asked for; equal and hashable by path.

    A run of your own module or data needs them again to resume or load: pass them to `convolve.open`. A run that was
    trained by this process has them. `result` is the outcome of training in this process, None otherwise.
    """

    def __init__(self, path: str | Path, *, user: UserCode | None = None, result: TrainReport | None = None) -> None:
        self.path = Path(path).absolute()
        self.result = result
        self._user = user

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __reduce__(self) -> tuple[type[Run], tuple[str]]:
        return Run, (str(self.path),)

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        from convolve.api.notebook import run_html

        return run_html(self)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def config(self) -> Config:
        """The resolved config, enough to repeat the run."""
        if not (self.path / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"{self.path}: not a run folder ({CONFIG_FILE} is missing); give a folder that `train` created"
            )
        return read_saved(self.path / CONFIG_FILE)

    @property
    def finished(self) -> bool:
        """True if the run is complete; False if it is in progress, was stopped or has failed."""
        return self._end.get("status") == "success"

    @property
    def stopped_by(self) -> str | None:
        """The signal or reason that stopped the run; None if it is complete, in progress or has failed."""
        found = self._end.get("stopped_by")
        return found if isinstance(found, str) else None

    @property
    def lost_guarantees(self) -> list[str]:
        """One line for each guarantee that does not hold for this run, and why; empty for named models and data."""
        events = [event for event in read_events(self.path / EVENTS_FILE) if event.get("kind") == "lost_guarantee"]
        return list(dict.fromkeys(str(event.get("message")) for event in events))

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints, oldest first."""
        from convolve.checkpoint.store import find_best, find_checkpoints

        if not (self.path / CHECKPOINTS_FOLDER).is_dir():
            return []
        best = find_best(self.path / CHECKPOINTS_FOLDER)
        return [Checkpoint(path, step_of(path), path == best) for path in find_checkpoints(self.path)]

    @property
    def best(self) -> Checkpoint | None:
        """The checkpoint that validated best, if one was validated."""
        return next((checkpoint for checkpoint in self.checkpoints if checkpoint.best), None)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The figures in summary.json, such as `test_accuracy`; empty until the run ends."""
        return read_json(self.path / SUMMARY_FILE)

    @property
    def training(self) -> list[TrainRecord]:
        """The log points of training."""
        return read_training(self.path)

    @property
    def validations(self) -> list[ValidationRecord]:
        """The validations during training."""
        return read_validations(self.path)

    @property
    def _end(self) -> Mapping[str, Any]:
        """The end event after the last start, empty without one."""
        end: Mapping[str, Any] = {}
        for event in read_events(self.path / EVENTS_FILE):
            if event.get("kind") in ("start", "end"):
                end = event if event["kind"] == "end" else {}
        return end

    def checkpoint(self, name: str) -> Checkpoint:
        """Return a checkpoint or an average by name; `best` is the newest one if none was validated."""
        from convolve.checkpoint.store import choose_checkpoint, find_checkpoints

        if name == "newest":
            path = find_checkpoints(self.path)[-1]
        elif name == "best":
            path = choose_checkpoint(self.path)
        else:
            found = [folder / name for folder in (self.path / CHECKPOINTS_FOLDER, self.path / AVERAGES_FOLDER)]
            path = next((folder for folder in found if (folder / MANIFEST_FILE).is_file()), found[0])
            if not path.is_dir():
                known = [path.name for path in find_checkpoints(self.path)]
                raise CheckpointError(f"checkpoint {name}: not in {self.path}; {suggest(name, ['best', *known])}")
        best = (path.parent / "best.txt").is_file() and choose_checkpoint(self.path) == path
        return Checkpoint(path, step_of(path) if path.name.startswith("step-") else -1, best)

    def resume(
        self,
        *,
        data: Source | None = None,
        model: ModelLike | None = None,
        loss: LossLike | None = None,
        metrics: Sequence[MetricLike] = (),
        callbacks: Sequence[CallbackLike] = (),
        progress: bool | Console | None = None,
        **options: Unpack[ResumeOptions],
    ) -> Run:
        """Continue from the newest checkpoint; the result is that of an uninterrupted run.

        `epochs` or `iterations` set a new length, which extends a finished run; layout options such as `replicas` may
        change. Your own data, model, loss, metrics, `optimizer` and `augment` must be given again unless this process
        trained the run.
        """
        from convolve.api.training import resume_run
        from convolve.api.user_code import OBJECTS

        given: dict[str, Any] = dict(options)
        objects = {name: given.pop(name) for name in OBJECTS if name in given}
        return resume_run(self, self._with(data, model, loss, metrics, **objects), callbacks, progress, given)

    def validate(
        self,
        data: Source | None = None,
        *,
        checkpoint: str = "newest",
        metrics: Sequence[MetricLike] = (),
        batch_size: int | None = None,
        engine: Engines = "torch",
        outputs: bool = False,
        progress: bool | Console | None = False,
    ) -> ValidationRecord:
        """Evaluate a checkpoint on the test images of the run, or on other data.

        Args:
            metrics: metrics besides loss and accuracy [those of the run, if they were given to this handle].
            outputs: whether the record has `outputs`, the logits and targets of all images.
        """
        from convolve.api.validation import validate_run
        from convolve.runs.validate import ValidateOptions

        options = ValidateOptions(batch_size=batch_size, outputs=outputs)
        return validate_run(self, data, checkpoint, options, metrics=metrics, engine=engine, progress=progress)[0]

    def validate_all(
        self,
        data: Source | None = None,
        *,
        metrics: Sequence[MetricLike] = (),
        batch_size: int | None = None,
        engine: Engines = "torch",
        outputs: bool = False,
        progress: bool | Console | None = False,
    ) -> list[ValidationRecord]:
        """Evaluate every checkpoint and average of the run, in order; see `validate`."""
        from convolve.api.validation import validate_run
        from convolve.runs.validate import ValidateOptions

        options = ValidateOptions(batch_size=batch_size, outputs=outputs)
        return validate_run(self, data, None, options, metrics=metrics, engine=engine, progress=progress)

    def load(
        self,
        *,
        checkpoint: str = "best",
        transform: Callable[[Any], Tensor] | None = None,
        device: str = "auto",
        engine: Engines = "torch",
    ) -> Classifier:
        """Return the model of a checkpoint, ready to classify images; see `convolve.load`."""
        from convolve.api.classifier import load

        return load(self, checkpoint=checkpoint, transform=transform, device=device, engine=engine)

    def export(
        self,
        format: Formats = "onnx",
        *,
        output: str | Path | None = None,
        int8: bool = False,
        max_accuracy_loss: float = 0.01,
        checkpoint: str = "best",
        progress: bool | Console | None = False,
    ) -> ExportReport:
        """Write the model as a file for other programs, verified against the model. The result has the `path`.

        Args:
            max_accuracy_loss: for int8, the largest loss of accuracy on the test images, in [0, 1].
        """
        with session(), open_progress(progress) as console:
            from convolve.export.export import export

            target = None if output is None else Path(output)
            return export(
                self.checkpoint(checkpoint).path,
                format,
                console,
                output=target,
                int8=int8,
                max_accuracy_loss=max_accuracy_loss,
                user=self._copy(),
            )

    def average(
        self,
        mode: Averages,
        *,
        count: int | None = None,
        decay: float = 0.99,
        discard_last: int = 0,
        statistics: Statistics = "measured",
        filename: str | None = None,
        progress: bool | Console | None = False,
    ) -> AverageReport:
        """Average several checkpoints into one, which is saved, validated and loaded by the name of its folder."""
        for name, value, valid, rule in (
            ("count", count, count is None or count >= 1, "at least 1"),
            ("discard_last", discard_last, discard_last >= 0, "at least 0"),
            ("decay", decay, 0 <= decay < 1, "at least 0 and below 1"),
        ):
            if not valid:
                raise ConfigError(f"{name}={value}: must be {rule}")
        with session(), open_progress(progress) as console:
            from convolve.runs.average import AverageRecipe, average

            recipe = AverageRecipe(mode, count, decay, discard_last, statistics)
            return average(self.path, recipe, console, name=filename, user=self._copy())

    def report(self, *, output: str | Path | None = None) -> ReportResult:
        """Write the HTML report of the best checkpoint. The result has the `path`."""
        return report(self, output=output)

    def plot(self, *columns: str) -> Plot:
        """Return the curves of the run, by default loss and accuracy. Notebooks show it; `save` writes a file."""
        return plot_run(self.name, self.training, self.validations, columns or ("loss", "accuracy"))

    def stop(self, reason: str) -> None:
        """Stop this run after the current step, with a checkpoint. Call it from any thread or callback."""
        from convolve.api.training import stop_run

        stop_run(self, reason)

    def _with(
        self,
        data: Source | None = None,
        model: ModelLike | None = None,
        loss: LossLike | None = None,
        metrics: Sequence[MetricLike] = (),
        **objects: Any,
    ) -> UserCode:
        from convolve.api.user_code import open_registered_data, read_objects, read_user_code
        from convolve.engine.user_code import NO_USER_CODE

        base = read_objects(objects, self._user or NO_USER_CODE)
        user = read_user_code(data, model, loss, metrics, base=base)
        # A checkpoint folder outside of a run has no config.
        return open_registered_data(user, self.config) if (self.path / CONFIG_FILE).is_file() else user

    def _copy(self, data: Source | None = None) -> UserCode:
        """Return the user's code with a copy of the module, which gets the weights of a checkpoint."""
        user = self._with(data)
        return user if user.module is None else replace(user, module=user.module.copy())


def open(
    run: str | Path | Run,
    *,
    data: Source | None = None,
    model: ModelLike | None = None,
    loss: LossLike | None = None,
    metrics: Sequence[MetricLike] = (),
    optimizer: OptimizerLike | None = None,
    augment: AugmentLike | None = None,
) -> Run:
    """Return the handle of a run folder, or of a single checkpoint folder.

    A run of your own module, data, loss, metrics, optimizer or augmentation needs them again: code that a file names is
    never imported.
    """
    path = Path(run)
    if not (path / CONFIG_FILE).is_file() and not (path / MANIFEST_FILE).is_file():
        from convolve.checkpoint.store import find_checkpoints

        find_checkpoints(path)  # a folder of checkpoints will do; anything else is an error
    if not any(given is not None for given in (data, model, loss, optimizer, augment)) and not metrics:
        return Run(path)
    return Run(path, user=Run(path)._with(data, model, loss, metrics, optimizer=optimizer, augment=augment))


def runs(folder: str | Path = "runs") -> list[Run]:
    """Return the runs in a folder, the most recently started first."""
    found = [path.parent for path in Path(folder).glob(f"*/{CONFIG_FILE}")]
    return [Run(path) for path in sorted(found, key=lambda path: (path / CONFIG_FILE).stat().st_mtime, reverse=True)]


def report(
    *runs: str | Path | Run, output: str | Path | None = None, progress: bool | Console | None = False
) -> ReportResult:
    """Write one HTML page about one run, or several side by side. The result has the `path`."""
    if not runs:
        raise ConfigError("report: no run given; name one run folder or several")
    handles = [run if isinstance(run, Run) else Run(run) for run in runs]
    with session(), open_progress(progress) as console:
        from convolve.runs.report import report as write

        users = [handle._copy() for handle in handles]
        target = None if output is None else Path(output)
        return write([handle.path for handle in handles], console, output=target, users=users)
