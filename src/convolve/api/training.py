"""`train`: one function for named and own models and data; `Run.resume` continues what it started."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from convolve.api.callbacks import CallbackConsole, CallbackLike, read_callbacks
from convolve.api.progress import open_progress
from convolve.api.run import Run, Stopped
from convolve.api.session import session, training
from convolve.api.user_code import (
    LossLike,
    MetricLike,
    ModelLike,
    Source,
    locate,
    open_registered_data,
    read_user_code,
    take_objects,
)
from convolve.config.defaults import default_config
from convolve.config.loading import field_name, resolve
from convolve.config.schema import SECTION_OF, Config
from convolve.errors import ConfigError, suggest
from convolve.loggers.base import Console

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from convolve.api.ranks import Job
    from convolve.config.options import Options
    from convolve.engine.loop import StopRequest
    from convolve.engine.user_code import UserCode
    from convolve.recipes.photos import PhotoPlan
    from convolve.runs.folds import FoldsReport
    from convolve.runs.results import TrainReport

TrainFn = Callable[["CallbackConsole", "StopRequest"], "TrainReport"]


def prepare() -> None:
    """Configure oneDNN and malloc for this process as the command does. Call before torch is imported.

    Small models train faster afterwards, with the same bits. No other call changes these settings.
    """
    from convolve import device

    device.prepare()


def train(
    data: Source | None = None,
    model: ModelLike | None = None,
    *,
    config: str | Path | Config | None = None,
    loss: LossLike | None = None,
    metrics: Sequence[MetricLike] | bool = (),
    callbacks: Sequence[CallbackLike] = (),
    progress: bool | Console | None = None,
    **options: Unpack[Options],
) -> Run:
    """Train a model from the start in a new run folder, and return the handle of the folder.

    Without arguments, LeNet on MNIST, as `convolve train`.

    Args:
        data: name of a data set, or a folder (a `Path`, or a `str` that is no name); or a data set object with
            `__len__` and `__getitem__` or `sample(index, rng)`, or a pair of them for training and testing.
        model: name of a model; or a module, or a class or function that makes one.
        config: name of a config to start from, a YAML file, or a `Config`.
        loss: function of outputs and targets that returns one value per sample [cross-entropy].
        metrics: metrics besides loss and accuracy; False computes none during training, for speed.
        callbacks: observers of the run, such as loggers: objects, classes or names.
        progress: True or False; None shows progress on a terminal and in a notebook.
        options: every option of the command line, with underscores: `epochs=3, batch_size=64`. `optimizer` is also a
            class of torch.optim, or a function of parameter groups; `augment` a function of an image.

    Raises:
        Stopped: after Ctrl-C. A checkpoint was saved, and `Stopped.run` can be resumed.
    """
    given: dict[str, Any] = dict(options)
    if isinstance(metrics, bool):
        given["metrics"], metrics = metrics, ()
    with session(), training(), open_progress(progress) as console:
        from convolve.engine.user_code import NO_USER_CODE

        user = read_user_code(data, model, loss, metrics, base=take_objects(given, NO_USER_CODE))
        plan = plan_folder(data, given, console) if model is None and config is None else None
        resolved = read_config(data, model, config, given) if plan is None else plan.config
        _reject_folds(resolved)
        user = replace(open_registered_data(user, resolved), strict=resolved.run.strict)
        resolved = complete_config(resolved, user)
        check_data(resolved, user)
        return _run(
            user,
            CallbackConsole(console, read_callbacks(callbacks), lambda path: Run(path, user=user)),
            lambda tracked, stop: _train(resolved, user, tracked, stop, plan),
        )


def cross_validate(
    data: str | Path | None = None,
    model: str | None = None,
    *,
    config: str | Path | Config | None = None,
    progress: bool | Console | None = None,
    **options: Unpack[Options],
) -> FoldsReport:
    """Train once for each of `folds` parts of the data, which is held out, and return the mean of their accuracies.

    Run folders end with the number of the fold. After Ctrl-C, the last run of the report is the one that was stopped.

    Args:
        data: name of a data set, or a folder.
        model: name of a model.
        config: name of a config to start from, a YAML file, or a `Config`.
        options: those of `train`, among them `folds`.
    """
    with session(), training(), open_progress(progress) as console:
        from convolve.runs.folds import train_folds

        given: dict[str, Any] = dict(options)
        plan = plan_folder(data, given, console) if model is None and config is None else None
        resolved = read_config(data, model, config, given) if plan is None else plan.config
        if not resolved.is_cross_validation:
            raise ConfigError("cross_validate: give folds=5, or another number, and no fold; for one fold, use train")
        return train_folds(resolved, console)


def train_plan(
    plan: PhotoPlan,
    callbacks: Sequence[CallbackLike],
    progress: Console,
    *,
    loss: LossLike | None = None,
    metrics: Sequence[MetricLike] = (),
    objects: Mapping[str, Any] = MappingProxyType({}),
) -> Run:
    """Train the plan that the recipe for photos chose for `convolve train PHOTOS`; `objects` are the user's."""
    with session(), training(), open_progress(progress) as console:
        from convolve.engine.user_code import NO_USER_CODE

        _reject_folds(plan.config)
        for line in plan.lines:
            console.info(line)
        base = take_objects(dict(objects), replace(NO_USER_CODE, strict=plan.config.run.strict))
        user = read_user_code(None, None, loss, metrics, base=base)
        return _run(
            user,
            CallbackConsole(console, read_callbacks(callbacks), lambda path: Run(path, user=user)),
            lambda tracked, stop: _train(plan.config, user, tracked, stop, plan),
        )


def _reject_folds(config: Config) -> None:
    """Reject a cross-validation, which is several runs."""
    if config.is_cross_validation:
        raise ConfigError(f"--folds {config.data.folds}: is several runs; use cross_validate, or add --fold N for one")


def resume_run(
    run: Run,
    user: UserCode,
    callbacks: Sequence[CallbackLike],
    progress: bool | Console | None,
    options: Mapping[str, Any],
) -> Run:
    """Continue a run; see `Run.resume`."""
    with session(), training(), open_progress(progress) as console:
        from convolve.api.ranks import Job
        from convolve.runs.changes import Changes

        layout = {name: value for name, value in options.items() if name not in ("epochs", "iterations")}
        for name in layout:
            if SECTION_OF.get(name) != "parallel":
                raise ConfigError(f"resume: {name} cannot change; only epochs, iterations and the layout can")
        changes = Changes(options.get("epochs"), options.get("iterations"), layout)
        resolved = changes.apply(run.config)
        user = replace(user, strict=resolved.run.strict)
        check_data(resolved, user)
        return _run(
            user,
            CallbackConsole(console, read_callbacks(callbacks), lambda path: Run(path, user=user)),
            lambda tracked, stop: _resume(Job(resolved, run.path, user, changes), tracked, stop),
        )


def _train(
    config: Config, user: UserCode, console: CallbackConsole, stop: StopRequest, plan: PhotoPlan | None
) -> TrainReport:
    from convolve.runs import session as runs

    if not _needs_processes(config):
        recipe = None if plan is None else plan.to_json()
        return runs.train(config, console, user, runs.Hooks(stop, console.state), recipe)
    from convolve.api.ranks import Job, encode, run_ranks
    from convolve.runs.folder import reserve_run_dir

    encode(Job(config, Path(), user))  # what cannot be sent is an error before a folder is made
    folder = reserve_run_dir(config)
    return run_ranks(Job(config.replace(run_dir=folder), folder, user), console, stop)


def _resume(job: Job, console: CallbackConsole, stop: StopRequest) -> TrainReport:
    from convolve.runs import session as runs

    if not _needs_processes(job.config):
        return runs.resume(job.folder, console, job.changes, job.user, runs.Hooks(stop, console.state))
    from convolve.api.ranks import run_ranks

    return run_ranks(job, console, stop)


def _needs_processes(config: Config) -> bool:
    """Return whether this process must start the ranks of a run; under torchrun or Slurm it is one of them."""
    from convolve.distributed.topology import is_distributed

    return config.parallel.processes > 1 and not is_distributed()


_active: dict[Path, StopRequest] = {}


def stop_run(run: Run, reason: str) -> None:
    """Ask a run of this process to stop; see `Run.stop`."""
    request = _active.get(run.path)
    if request is None:
        raise ConfigError(f"{run.path}: not in progress in this process; stop its process with SIGTERM")
    request.reason = reason


def _run(user: UserCode, console: CallbackConsole, work: TrainFn) -> Run:
    """Train in this process, and raise `Stopped` if a signal stopped the run."""
    from convolve.engine.loop import StopRequest

    stop = StopRequest()
    console.on_start = lambda started: _active.update({started.path: stop})
    try:
        report = work(console, stop)
    finally:
        _active.clear()
        if user.data is not None:
            from convolve.data.user import close_workers

            close_workers()
    done = Run(report.run_dir, user=user, result=report)
    console.end()
    if isinstance(report.stopped_by, signal.Signals):
        raise_stopped(done, report.stopped_by)
    return done


def raise_stopped(run: Run, number: signal.Signals) -> None:
    """Raise `Stopped`. A signal other than Ctrl-C goes to the handler that was there before, which may end the process.

    If that handler raises, `Stopped` is the cause of its exception.
    """
    stopped = Stopped(run, number)
    if number != signal.SIGINT and threading.current_thread() is threading.main_thread():
        try:
            signal.raise_signal(number)
        except BaseException as error:
            raise error from stopped
    raise stopped


def read_config(
    data: Source | None, model: ModelLike | None, config: str | Path | Config | None, options: dict[str, Any]
) -> Config:
    """Return the config of the arguments of `train`."""
    given = {_option(name): value for name, value in options.items()}
    place = locate(data)
    for name, value in (("dataset", place.name), ("data_dir", place.folder)):
        if value is not None:
            if given.get(name) is not None:
                raise ConfigError(f"{name}={given[name]}: data={str(data)!r} is given as well; omit one")
            given[name] = value
    if isinstance(model, str):
        given["model"] = model
    if isinstance(config, Config):
        return config.replace(**given)
    if isinstance(config, Path):
        return Config.read(config).replace(**given)
    if config is None and (model is None or isinstance(model, str)):
        config, given = default_config(given)
    return resolve(config, None, given).config


def plan_folder(data: Source | None, options: dict[str, Any], console: Console) -> PhotoPlan | None:
    """Return the plan that the recipe for photos chooses for a folder, as `convolve train PHOTOS`; else None."""
    folder = locate(data).folder
    if folder is None:
        return None
    from convolve.recipes.photos import find_photos, plan_photos

    photos = find_photos(folder, console, str(options.get("task", "auto")))
    if photos is None:
        return None
    plan = plan_photos(folder, photos, {_option(name): value for name, value in options.items()}, console)
    for line in plan.lines:
        console.info(line)
    return plan


def _option(name: str) -> str:
    option = field_name(name)
    if option not in SECTION_OF:
        raise ConfigError(f"{name}: unknown option; {suggest(name, SECTION_OF)}")
    return option


def complete_config(config: Config, user: UserCode) -> Config:
    """Return the config with the names of the user's objects, which the run records."""
    changes: dict[str, Any] = {}
    if user.module is not None:
        changes["model"] = user.module.name
    if user.data is not None and config.data.workers is None:
        changes["workers"] = 0  # processes are started only if requested
    return config.replace(**changes) if changes else config


def check_data(config: Config, user: UserCode) -> None:
    """Reject options that do not apply to the user's data."""
    from convolve.data.user import UserReader

    reader = None if user.data is None else user.data.train
    if not isinstance(reader, UserReader):
        return
    if reader.floats and config.data.augment not in ("auto", "none"):
        raise ConfigError(
            f"augment={config.data.augment}: float images are used as they are; return uint8 images to augment them"
        )
