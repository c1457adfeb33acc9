"""Train a config in a new run folder, or resume a run: folder, `engine.build`, loop and callbacks joined."""

import platform
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convolve import __version__, device
from convolve.checkpoint.pretrained import adopt_weights, find_weights
from convolve.checkpoint.provenance import read_provenance
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import Store
from convolve.config import Config
from convolve.data.build import DataModule, name_dataset
from convolve.data.loader.loader import Loader, ReplicaShard
from convolve.distributed.collectives import Collectives, open_collectives, rank_zero_console, require_same_start
from convolve.distributed.partition import resolve_splits
from convolve.engine.build import (
    Numerics,
    build,
    build_initial_model,
    build_model,
    build_numerics,
    build_on_meta,
    match_training_numerics,
    open_data,
    run_span,
)
from convolve.engine.callbacks import LogCallback, evaluate_state, log_trigger
from convolve.engine.data_choice import follow_data_and_model
from convolve.engine.guarantees import LostGuarantee, find_lost, report_lost
from convolve.engine.loop import StepEvent, StopRequest, announce_slow_steps, fit, stop_on_signals
from convolve.engine.metrics import EvalResult
from convolve.engine.objective import name_of, require_loss
from convolve.engine.state import TrainState, load_weights
from convolve.engine.step import StepParts
from convolve.engine.stopping import EarlyStopCallback
from convolve.engine.throughput import Timer
from convolve.engine.user_code import NO_USER_CODE, UserCode
from convolve.label_scores import MEAN_AVERAGE_PRECISION
from convolve.loggers.base import Console
from convolve.models import registry
from convolve.models.network import Network
from convolve.numerics.execution import Execution
from convolve.numerics.select import why_no_kernels
from convolve.optim.optimizers import select_optimizer
from convolve.optim.schedules import RunSpan
from convolve.run_files import CHECKPOINTS_FOLDER
from convolve.runs.callbacks import build_callbacks
from convolve.runs.changes import Changes, continue_config, fit_processes
from convolve.runs.clock import elapsed_seconds
from convolve.runs.figures import summary_figures
from convolve.runs.finished import read_finished
from convolve.runs.folder import create_run_dir, discard_failed_start, has_started, lock_run, read_config
from convolve.runs.head import restart_average, start_from_head
from convolve.runs.load import read_thresholds
from convolve.runs.notices import report_data_wait, report_schedule, report_skipped_entries, report_whole_decoding
from convolve.runs.outputs import NullOutputs, RunOutputs, join_ranks, load_best
from convolve.runs.results import TrainReport, chance_level, read_best, reports_best, run_info
from convolve.runs.teacher import add_teacher, describe_teacher, require_same_teacher


@dataclass(frozen=True)
class Hooks:
    """What the caller of a run holds on to: a request to stop it, and values that every checkpoint stores."""

    stop: StopRequest = field(default_factory=StopRequest)
    state: Callable[[], dict[str, Any]] = dict


@dataclass(kw_only=True)
class Session:
    """One run in one process: its data, state and step, and where its output goes."""

    config: Config
    console: Console
    collectives: Collectives
    outputs: RunOutputs
    data: DataModule
    loader: Loader
    span: RunSpan
    numerics: Numerics
    state: TrainState
    parts: StepParts
    parameters: int
    started: float
    user: UserCode = NO_USER_CODE
    hooks: Hooks = field(default_factory=Hooks)
    lost_guarantees: tuple[LostGuarantee, ...] = ()
    best: EvalResult | None = None
    early_stop: dict[str, Any] = field(default_factory=dict)
    stopped_early: str | None = None
    previous_seconds: float = 0.0
    previous_elapsed: float = 0.0
    restored_step: int | None = None
    weights: dict[str, str | None] | None = None

    def restore(self) -> None:
        """Load the newest intact checkpoint."""
        store, console = self.outputs.store, self.console
        with self.collectives.positions.during("checkpoint"):
            path, snapshot = store.newest(console.info, self.state.holds)
        self.state.restore(snapshot)
        if self.config.model.fit_head and self.state.step == 0:
            restart_average(self.state)
        metadata = snapshot.state
        self.best = read_best(snapshot)
        self.early_stop = metadata.get("early_stop") or {}
        self.stopped_early = metadata.get("stopped_early")
        self.previous_seconds = snapshot.number("seconds", 0.0)
        self.previous_elapsed = snapshot.number("elapsed_seconds", 0.0) - elapsed_seconds()
        self.restored_step = self.state.step
        self.weights = read_provenance(metadata.get("weights"))
        require_loss(metadata.get("loss"), self.user.loss)
        require_same_teacher(self.config, metadata.get("teacher"))
        before, now = snapshot.count("native_layers", 0), len(self.parts.native_layers)
        if before != now:
            console.info(
                f"warning: {before} native layers before, {now} now; "
                "results will not be bit-identical to an uninterrupted run"
            )
        console.info(f"restored {path.name}")
        self.outputs.resume_from(path, self.state.step, best=bool(metadata.get("best")))

    def run(self) -> TrainReport:
        """Train to the end or until a signal, validate, and write the results."""
        self.outputs.write_config(self._build_whole)
        if self.restored_step is None and not self.config.model.fit_head:  # else with the features, which find more
            self.outputs.check_data(self.console)
        with self.outputs.open_loggers(self.console):
            return self._run()

    def _run(self) -> TrainReport:
        config, state, parts = self.config, self.state, self.parts
        log = LogCallback(
            trigger=log_trigger(config, self.span.epoch, self.span.total),
            parts=parts,
            loader=self.loader,
            logger=self.outputs.logger,
        )
        self._log_start()
        if config.model.fit_head and state.step == 0 and self.best is None:
            self.best = start_from_head(self)
            self.early_stop = EarlyStopCallback.state_of(self.best)
        timer = Timer(step=state.step, samples=state.samples, previous_seconds=self.previous_seconds)
        topology = self.collectives.topology
        shard = ReplicaShard(topology.replica, topology.replicas, config.parallel.bn_span, topology.stage == 0)
        sizes = (config.optim.batch_size, config.global_batch_size)
        batches = self.loader.step_batches(config.run.seed, state.samples, *sizes, shard)
        parts = announce_slow_steps(parts, self.console.info, self._end() - state.samples, config)
        with stop_on_signals(self.hooks.stop) as stop:
            event = fit(state, batches, parts, build_callbacks(self, log), total=self._end(), stop=stop, timer=timer)
        self.stopped_early = (event and event.stopped_early) or self.stopped_early
        weights = self._gather_weights()
        stopped_by = stop.signal or stop.reason or (signal.SIGTERM if event and event.stopped else None)
        result = None if stopped_by else self._test_result(event)
        if config.run.checkpoints and stopped_by is None:
            self.outputs.average_checkpoints(self.data)
        report = self._report(timer, result, log.final_loss, stopped_by)
        report_data_wait(timer.measured, self.console)
        self.outputs.write_bad_samples(self.loader.skipped, self.collectives)
        self.outputs.write_results(summary_figures(self, report, timer))
        if stopped_by is None:
            self.outputs.write_report(lambda: self._whole_model(weights), self.data, result, self.console.progress)
        return report

    def elapsed_seconds(self) -> float:
        """Return the time that counts against a budget: of the first process from its start, then from each restore."""
        return self.previous_elapsed + elapsed_seconds()

    def _end(self) -> int:
        """Return the position at which the run ends; a run that stopped early is complete."""
        return self.state.samples if self.stopped_early else self.span.total

    def checkpoint_metadata(self) -> dict[str, Any]:
        """Return the values that every checkpoint of the run stores."""
        return {
            "samples_per_epoch": self.span.epoch,
            "config": self.config.values(),
            "config_name": self.config.name,
            "classes": list(self.data.dataset.classes),
            "task": self.data.dataset.task,
            "transform": self.data.transform.to_json(),
            "native_layers": len(self.parts.native_layers),
            **({"weights": self.weights} if self.weights else {}),
            **describe_teacher(self.config),
            **({} if self.user.loss is None else {"loss": name_of(self.user.loss)}),
            "versions": {"convolve": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def _log_start(self) -> None:
        info = run_info(
            self.config,
            self.outputs.folder,
            data=self.data,
            numerics=self.numerics,
            parts=self.parts,
            parameters=self.parameters,
        )
        seconds = time.perf_counter() - self.started
        self.outputs.logger.start(replace(info, restored_step=self.restored_step, setup_seconds=seconds))
        self.outputs.emit("numerics", **self.numerics.to_json())
        report_skipped_entries(self.data.dataset.skipped, self.console, self.outputs.emit)
        report_whole_decoding(self.data.dataset.train, self.console)
        report_schedule(self.config, self.state.model, self.span, self.console)
        report_lost(self.lost_guarantees, self.console, self.outputs.emit)
        choice = self.numerics.choice
        if choice.execution != "plain":
            self.console.info(f"numerics {choice}")
        if missing := why_no_kernels(self.config, self.state.model, choice, self.data.device):
            self.console.info(f"native kernels unavailable ({missing}); using PyTorch's, which are slower")

    def _test_result(self, event: StepEvent | None) -> EvalResult | None:
        """Return the result of the run; that of a recipe is its best validation, even if training continued after."""
        run, result = self.config.run, None
        if run.validation_mode == "during":
            result = event.validation if event else self._evaluate_without_steps()
        elif run.validation_mode == "after" and run.checkpoints:
            result = self.outputs.validate_checkpoints(self.data)
        if self.data.dataset.validation is not None:
            return self._test_best()
        best = self._load_best() if reports_best(self.outputs.folder, self.data) else None
        return result if best is None else read_best(best)

    def _evaluate_without_steps(self) -> EvalResult | None:
        """Return the result of a process that trained nothing: of a fitted head, or of the restored last step."""
        if self.span.total == 0:
            return self.best
        return evaluate_state(self.state, self.parts, self.data.test_loader(), self.config)

    def _test_best(self) -> EvalResult:
        """Evaluate the checkpoint that validated best on the test images, which nothing has used before."""
        best = self._load_best()
        thresholds = read_thresholds(best.state, len(self.data.dataset.classes)) if best else None
        loader, progress = self.data.test_loader(), self.console.progress
        result = evaluate_state(self.state, self.parts, loader, self.config, thresholds, progress)
        self.outputs.emit("test", loss=result.loss, accuracy=result.accuracy, samples=result.samples)
        return result

    def _load_best(self) -> Snapshot | None:
        return load_best(self.outputs.store, self.collectives, self.state) if self.config.run.checkpoints else None

    def _build_whole(self) -> Network:
        data = self.data
        return build_model(self.config, data.transform, len(data.dataset.classes), data.device, self.user)

    def _gather_weights(self) -> dict[str, Tensor] | None:
        """Return the weights of all stages at rank 0, for the report; None if this process has the whole model."""
        if self.parts.infer is None or not self.config.log.report:
            return None
        return self.collectives.collect(self.state.model.state_dict())

    def _whole_model(self, weights: dict[str, Tensor] | None) -> tuple[Network, Execution]:
        """Return the trained model and its execution; `weights` are those of all stages if the model is split."""
        if weights is None:
            return self.state.model, self.state.execution
        model = self._build_whole()
        load_weights(model, Snapshot({"model": weights}, {}))
        return model, match_training_numerics(self.config, model, self.data.device)

    def _report(
        self, timer: Timer, result: EvalResult | None, final_loss: float, stopped_by: signal.Signals | str | None
    ) -> TrainReport:
        name, measured = stopped_by.name if isinstance(stopped_by, signal.Signals) else stopped_by, timer.measured
        self.outputs.emit("end", status="success" if stopped_by is None else "aborted", stopped_by=name)
        return TrainReport(
            run_dir=self.outputs.folder,
            test_accuracy=result.accuracy if result else None,
            test_samples=result.samples if result else 0,
            images_per_second=measured.images_per_second if measured else 0.0,
            ms_per_step=measured.ms_per_step if measured else 0.0,
            seconds=time.perf_counter() - self.started,
            steps=self.state.step,
            final_loss=final_loss if self.config.log.metrics else None,
            dataset=self.data.dataset.name,
            split=self.data.dataset.test_name,
            stopped_by=stopped_by,
            metrics=result.metrics if result else {},
            stopped_early=self.stopped_early,
            chance=chance_level(self.outputs.folder, self.data),
            labels=result.labels if result else (),
        )


def open_session(
    config: Config, folder: Path, console: Console, collectives: Collectives, user: UserCode = NO_USER_CODE
) -> Session:
    """Open the data of a run and build its state and step."""
    started = time.perf_counter()
    data = open_data(config, console, user)
    config = name_dataset(config, data.dataset.name)
    span = run_span(config, data)
    store = Store.open(folder / CHECKPOINTS_FOLDER, keep=config.run.keep_checkpoints, ranks=join_ranks(collectives))
    scores = (MEAN_AVERAGE_PRECISION,) if data.dataset.task == "multi-label" else ()
    outputs = (RunOutputs if collectives.is_rank_zero else NullOutputs)(folder, config, store, user, scores)
    numerics = build_numerics(
        config, data.device, span, folder=folder, emit=outputs.emit, any_rank=collectives.any_rank
    )
    weights = None
    if store.paths():
        model = build_model(config, data.transform, len(data.dataset.classes), data.device, user)
    else:
        weights = find_weights(config, console)
        model = build_initial_model(config, data, console, user, weights)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    lost = find_lost(model, data, config, user)
    state, parts = build(config=config, data=data, collectives=collectives, numerics=numerics, model=model, user=user)
    return Session(
        config=config,
        console=console,
        collectives=collectives,
        outputs=outputs,
        data=data,
        loader=data.train_loader(),
        span=span,
        numerics=numerics,
        state=state,
        parts=add_teacher(config, data, parts),
        parameters=parameters,
        started=started,
        user=user,
        weights=weights.to_json() if weights else None,
        lost_guarantees=tuple(lost),
    )


def train(
    config: Config,
    console: Console,
    user: UserCode = NO_USER_CODE,
    hooks: Hooks | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> TrainReport:
    """Train a config from the start in a new run folder; `recipe` describes how the config was chosen.

    With `--resume`, a run that has started is continued.
    """
    if config.run.resume:
        config = fit_processes(config)
    device.configure(config.run.threads)
    select_optimizer(config.optim, user.optimizer)
    if user.module is None:
        registry.check(config.model)
        config = config if user.data else follow_data_and_model(config)
        resolve_splits(build_on_meta(config), config)
    with open_collectives(config.parallel, device.select(config.run.device)) as collectives:
        require_same_start(collectives, config)
        console = rank_zero_console(collectives, console)
        config = adopt_weights(config, console)
        if config.run.resume and collectives.any_rank(collectives.is_rank_zero and has_started(config)):
            folder = Path(str(config.run.run_dir))
            return _resume(continue_config(read_config(folder), config), folder, console, collectives, user, hooks)
        folder = Path(
            collectives.broadcast_str(str(create_run_dir(config.run, config.name)) if collectives.is_rank_zero else "")
        )
        with lock_run(folder, collectives), discard_failed_start(folder, collectives), user.in_use():
            session = open_session(config, folder, console, collectives, user)
            session.hooks = hooks or session.hooks
            session.outputs.write_recipe(recipe)
            return session.run()


def resume(
    folder: Path,
    console: Console,
    changes: Changes | None = None,
    user: UserCode = NO_USER_CODE,
    hooks: Hooks | None = None,
) -> TrainReport:
    """Continue a run from its newest intact checkpoint, with changes of length or layout; a finished one is kept."""
    config = (changes or Changes()).apply(read_config(folder))
    device.configure(config.run.threads)
    with open_collectives(config.parallel, device.select(config.run.device)) as collectives:
        require_same_start(collectives, config)
        return _resume(config, folder, rank_zero_console(collectives, console), collectives, user, hooks)


def _resume(
    config: Config, folder: Path, console: Console, collectives: Collectives, user: UserCode, hooks: Hooks | None
) -> TrainReport:
    with lock_run(folder, collectives), user.in_use():
        if finished := read_finished(folder, config):
            console.info(
                f"{folder} is complete at step {finished.steps}; nothing was changed (extend it with --epochs or "
                "--iterations)"
            )
            return finished
        session = open_session(config, folder, console, collectives, user)
        session.hooks = hooks or session.hooks
        if session.outputs.store.paths() or not (config.model.fit_head or config.run.resume):
            session.restore()
        else:
            session.outputs.start_again()
        return session.run()
