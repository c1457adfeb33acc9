"""A training from its config to its report: `train` begins one, `restore` goes on with one.

`convolve train`: a new run.

`convolve restore`: go on with a run exactly where it stopped.
"""

import gc
import platform
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch

from convolve import __version__, device
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import AsyncSaver, Store
from convolve.config import Config
from convolve.config.loading import build, dump, parse
from convolve.config.training import AUTO_SPLITS
from convolve.data.build import DataModule, name_dataset
from convolve.data.loader.loader import ReplicaShard, StepBatch
from convolve.distributed import gradient_sync
from convolve.distributed.collectives import Collectives, open_collectives, rank_zero_console, require_same_start
from convolve.distributed.gradient_sync import GradientSync
from convolve.distributed.partition import partition_model, resolve_splits
from convolve.engine.build import (
    Numerics,
    build_model,
    build_numerics,
    build_on_meta,
    initialize_weights,
    match_training_numerics,
    open_data,
)
from convolve.engine.callbacks import (
    Callbacks,
    IntervalTrigger,
    LogCallback,
    LossScaleCallback,
    ProgressCallback,
    SaveCallback,
    ValidateCallback,
    WeightCheckCallback,
)
from convolve.engine.ema import ModelEMA
from convolve.engine.evaluate import VALID_BATCH, LogitsFn
from convolve.engine.forward_backward import ForwardBackward, ForwardBackwardFn, PassContext, PipelineForwardBackward
from convolve.engine.loop import fit, run_samples, stop_on_signals
from convolve.engine.loss import CrossEntropy
from convolve.engine.metrics import EvalResult, Metrics, NullMetrics, RunningMetrics
from convolve.engine.state import TrainState, load_weights
from convolve.engine.step import StepParts, clip_to_norm, no_clipping
from convolve.engine.throughput import Throughput, Timer
from convolve.errors import CheckpointError, ConfigError
from convolve.files import write_file
from convolve.layers.batch_norm import NormStatistics
from convolve.loggers.base import Console, Logger, LoggerGroup, RunInfo
from convolve.loggers.files import open_loggers, truncate_after
from convolve.models import registry
from convolve.models.network import Network
from convolve.models.summary import summarize
from convolve.numerics.execution import Execution
from convolve.numerics.select import apply_kernels, why_no_kernels
from convolve.optim.optimizers import build_optimizer
from convolve.optim.schedules import RunSpan, build_schedule
from convolve.run_files import BAD_SAMPLES_FILE, CHECKPOINTS_FOLDER, CONFIG_FILE, GRAPH_FILE
from convolve.runs.average import average_at_end
from convolve.runs.describe import write_svg
from convolve.runs.folder import create_run_dir, lock_run
from convolve.runs.report import write_training_report
from convolve.runs.summary import case_name, write_summary
from convolve.runs.validate import validate_checkpoints

DATA_BOUND_FRACTION = 0.25


@dataclass(frozen=True)
class TrainReport:
    """What a training came to; accuracy is a share of 1, None where nothing was validated."""

    run_dir: Path
    test_accuracy: float | None
    test_samples: int
    images_per_second: float
    ms_per_step: float
    seconds: float
    steps: int
    final_loss: float | None
    dataset: str
    stopped_by: signal.Signals | None = None


class Session:
    """One run: its folder, its pieces, and the state that a step changes."""

    def __init__(self, config: Config, folder: Path, console: Console, team: Collectives) -> None:
        self.began = time.perf_counter()
        self.team = team
        self.folder = folder
        self.console = console
        self.material: DataModule = open_data(config, console)
        self.config = name_dataset(config, self.material.dataset.name)
        self.loader = self.material.train_loader()
        self.total = run_samples(config, len(self.loader))
        self.store = Store.open(folder / CHECKPOINTS_FOLDER, keep=config.run.keep_checkpoints)
        model = build_model(config, self.material.transform, len(self.material.dataset.classes), self.material.device)
        if not self.store.paths():
            initialize_weights(model, config, self.loader, console)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.place = partition_model(model, config, team)
        optimizer = build_optimizer(self.place.part, config.settled_optim(), self.place.holdings.ownership.owns)
        self.state = TrainState(self.place.part, optimizer, holdings=self.place.holdings)
        if config.optim.ema_decay is not None:
            self.state.averager = ModelEMA(self.place.part, config.optim.ema_decay)
        self.numerics = self._begin_numerics()
        self.trained: tuple[Network, Execution] = self.place.part, self.state.arithmetic
        self.writer: Logger = LoggerGroup([])
        self.best_accuracy = -1.0
        self.earlier_seconds = 0.0
        self.restored_step: int | None = None

    def _begin_numerics(self) -> Numerics:
        """Choose the arithmetic, and let the network compute with it from now on."""
        numerics = build_numerics(
            self.config,
            self.material.device,
            self.folder,
            lambda kind, **facts: self.writer.event(kind, **facts),
            (self.total, len(self.loader)),
            self.team.any_rank,
        )
        self.state.arithmetic, self.state.scaler = numerics.arithmetic, numerics.scaler
        numerics.arithmetic.install(self.state.model)
        self.native_layers = apply_kernels(self.config, self.state.model, numerics.choice)
        numerics.arithmetic.round_initial_weights()
        return numerics

    def write_config(self) -> None:
        """Store the resolved config, which is enough to repeat the run, and the drawing if one is asked for."""
        if not self.team.is_rank_zero:
            return
        write_file(self.folder / CONFIG_FILE, dump(self.config).encode())
        if self.config.log.draw_graph:
            write_svg(summarize(self.config.model.model, self._build_whole()), self.folder / GRAPH_FILE)

    def resume(self) -> Path:
        """Become what the newest good checkpoint holds, and return its path."""
        path, snapshot = self.store.newest(self.console.info)
        self.state.restore(snapshot)
        self.best_accuracy = float(snapshot.state.get("best_accuracy", -1.0))
        if snapshot.state.get("best") and self.team.is_rank_zero:
            # A kill between the save and its mark leaves the best checkpoint unmarked.
            self.store.mark_best(path)
        self.earlier_seconds = float(snapshot.state.get("seconds", 0.0))
        self.restored_step = self.state.step
        self._compare_kernels(int(snapshot.state.get("native_layers", 0)))
        return path

    def _compare_kernels(self, before: int) -> None:
        """Native layers and PyTorch's differ in the last bits, so a change of them is worth a line."""
        if before != len(self.native_layers):
            self.console.info(
                f"native code computed {before} layers until here and computes {len(self.native_layers)} from now on: "
                "the result will not be that of an unbroken run to the last bit"
            )

    def run(self) -> TrainReport:
        """Train to the end (or until a signal), validate, and write down what came out."""
        with self._open_files() as files:
            self.writer = LoggerGroup([self.console, files])
            return self._run()

    def _open_files(self) -> LoggerGroup:
        """The first process writes for all."""
        if not self.team.is_rank_zero:
            return LoggerGroup([])
        return open_loggers(self.config.log, self.folder, self.config.run.seed)

    def _run(self) -> TrainReport:
        actions = self.assemble()
        self._announce()
        with stop_on_signals() as request:
            stopped = fit(self.state, self.step_batches(), actions.parts, actions.in_order(), self.total, request)
        self.trained = self._gather_whole()
        stopped_by = request.signal or (signal.SIGTERM if stopped else None)
        if stopped_by is not None:
            return self._report(actions, None, stopped_by)
        test = self._test_counts(actions)
        if self.config.run.checkpoints and self.team.is_rank_zero:
            self._average()
        return self._report(actions, test, None)

    def step_batches(self) -> Iterator[StepBatch]:
        """Return the batches of this process from its position on."""
        config = self.config
        shard = ReplicaShard(self.team.topology.replica, self.team.topology.replicas)
        sizes = (config.optim.batch_size, config.global_batch_size)
        return self.loader.step_batches(config.run.seed, self.state.samples, *sizes, shard)

    def introduce(self) -> RunInfo:
        """The run, for those who write it down."""
        return RunInfo(
            name=self.folder.name,
            folder=self.folder,
            config=self.config.values(),
            facts={
                "model": self.config.model.model,
                "parameters": self.parameters,
                "dataset": self.material.dataset.name,
                "training_images": len(self.loader),
                "test_images": len(self.material.dataset.test),
                "device": str(self.material.device),
                "threads": torch.get_num_threads(),
                "global_batch_size": self.config.global_batch_size,
                "numerics": str(self.numerics.choice),
                "native_layers": len(self.native_layers),
            },
            restored_step=self.restored_step,
            setup_seconds=time.perf_counter() - self.began,
        )

    def _announce(self) -> None:
        self.writer.start(self.introduce())
        self.writer.event("numerics", **self.numerics.facts())
        if self.numerics.choice.execution != "plain":
            self.console.info(f"numerics {self.numerics.choice}")
        if missing := why_no_kernels(self.config, self.numerics.choice, self.material.device):
            self.console.info(f"layers without native code ({missing}): PyTorch's do the same work, and take longer")

    def assemble(self) -> Callbacks:
        """What a step is made of, and what happens between steps."""
        config, per_epoch = self.config, len(self.loader)
        tally = RunningMetrics(self.material.device, self.team) if config.log.metrics else NullMetrics()
        # The payload of a step: batch-norm statistics and the stop flag.
        grad_sync = gradient_sync.build(self.team, self.state.model, len(NormStatistics(self.state.model).flat) + 1)
        schedule = build_schedule(config.schedule, config.settled_optim().learning_rate, RunSpan(self.total, per_epoch))
        loss = CrossEntropy(config.optim.label_smoothing, config.optim.label_smoothing_over)
        executor = self._executor(loss, tally, grad_sync)
        clip = no_clipping if config.optim.clip_norm is None else clip_to_norm(config.optim.clip_norm, self.team)
        clock = Timer(samples=self.state.samples, step=self.state.step, earlier=self.earlier_seconds)
        log = LogCallback(self._rhythm_of_logs(), tally, schedule, self.loader, self.writer, clock)
        validate = ValidateCallback(
            IntervalTrigger(Fraction(config.run.validation_frequency) * per_epoch, self.total),
            self.material.test_loader(),
            config.optim.valid_batch_size or VALID_BATCH,
            per_epoch,
            self.writer,
            clock,
            self.team,
            self.logits_fn(),
            config.run.validation_views,
        )
        save = SaveCallback(
            self._rhythm_of_checkpoints(),
            AsyncSaver(self.store),
            self._facts(),
            validate.latest,
            self.writer,
            clock,
            self.team,
            self.best_accuracy,
        )
        ownership = self.place.holdings.ownership
        parts = StepParts(schedule, executor, clip, config.run.seed, self.team, grad_sync, ownership)
        every = config.parallel.epochs_per_sync
        sync = WeightCheckCallback(
            IntervalTrigger(Fraction(every) * per_epoch if every else None, self.total), self.team
        )
        scale = LossScaleCallback(self.writer, self.state.scaler)
        return Callbacks(parts, [ProgressCallback(self.console, self.total), scale, sync], log, validate, save, config)

    def _executor(self, loss: CrossEntropy, tally: Metrics, grad_sync: GradientSync) -> ForwardBackwardFn:
        config, pipeline = self.config, self.place.pipeline
        shift = self.team.topology.replica * config.optim.batch_size if config.parallel.identical_replica_seeding else 0
        setting = PassContext(config.run.seed, self.state.arithmetic, grad_sync, shift)
        if pipeline is None:
            return ForwardBackward(self.state.model, loss, tally, setting)
        return PipelineForwardBackward(self.state.model, loss, tally, setting, pipeline)

    def _rhythm_of_logs(self) -> IntervalTrigger:
        log = self.config.log
        if log.log_freq is not None:
            return IntervalTrigger(Fraction(log.log_freq * self.config.global_batch_size), self.total)
        return IntervalTrigger(Fraction(len(self.loader), log.logs_per_epoch), self.total)

    def _rhythm_of_checkpoints(self) -> IntervalTrigger:
        run, per_epoch = self.config.run, len(self.loader)
        if run.epochs_per_ckpt is not None:
            return IntervalTrigger(Fraction(run.epochs_per_ckpt * per_epoch), self.total)
        return IntervalTrigger(Fraction(per_epoch, run.ckpts_per_epoch) if run.ckpts_per_epoch else None, self.total)

    def _facts(self) -> dict[str, Any]:
        return {
            "samples_per_epoch": len(self.loader),
            "config": self.config.values(),
            "config_name": self.config.name,
            "classes": list(self.material.dataset.classes),
            "transform": self.material.transform.to_json(),
            "native_layers": len(self.native_layers),
            "versions": {"convolve": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def _test_counts(self, actions: Callbacks) -> EvalResult | None:
        if self.config.run.validation_mode == "during":
            return actions.validate.newest
        if self.config.run.validation_mode == "after" and self.config.run.checkpoints and self.team.is_rank_zero:
            records = validate_checkpoints(self.folder, self.store.paths(), self.material, self.writer)
            newest = records[-1]
            return EvalResult(newest.loss, newest.accuracy, newest.samples)
        return None

    def _average(self) -> None:
        """Store and validate the averages that the config asks for."""
        for average in average_at_end(self.folder, self.store.paths(), self.config, self.material):
            if average.validation is not None and self.config.run.validation_mode != "none":
                self.writer.valid(average.validation)

    def _report(self, actions: Callbacks, test: EvalResult | None, stopped_by: signal.Signals | None) -> TrainReport:
        throughput = actions.log.clock.throughput
        self.writer.event("end", status="success" if stopped_by is None else "aborted")
        report = TrainReport(
            run_dir=self.folder,
            test_accuracy=test.accuracy if test else None,
            test_samples=test.samples if test else 0,
            images_per_second=throughput.images_per_second or 0.0,
            ms_per_step=throughput.ms_per_step or 0.0,
            seconds=time.perf_counter() - self.began,
            steps=self.state.step,
            final_loss=actions.log.final_loss if self.config.log.metrics else None,
            dataset=self.material.dataset.name,
            stopped_by=stopped_by,
        )
        self._tell_of_data(throughput)
        if self.config.log.logs and self.team.is_rank_zero:
            write_summary(self.folder, self._figures(report, throughput))
            if self.config.log.curves and self.config.log.metrics:
                # Not before it is needed: matplotlib takes half a second to load.
                from convolve.report.curves_png import draw_curves

                draw_curves(self.folder)
            if self.config.log.report and stopped_by is None:
                network, execution = self.trained
                write_training_report(self.folder, network, self.material, execution, evaluated=test is not None)
            # Drawings refer to themselves: without this, a process that trains again and again holds many of them.
            gc.collect()
        return report

    def _build_whole(self) -> Network:
        """The network with all stages, and weights of its own."""
        classes = len(self.material.dataset.classes)
        return build_model(self.config, self.material.transform, classes, self.material.device)

    def logits_fn(self) -> LogitsFn | None:
        """Return the evaluation through the pipeline; None if the model is not split."""
        if self.place.pipeline is None:
            return None
        return partial(self.place.pipeline.infer, forward=partial(self.state.arithmetic.forward, self.state.model))

    def _gather_whole(self) -> tuple[Network, Execution]:
        """Return the trained model for the report and its execution; rank 0 collects the stages of a pipeline."""
        if self.place.pipeline is None or not self.config.log.report:
            return self.state.model, self.state.arithmetic
        tensors = self.team.collect(self.state.model.state_dict())
        if not self.team.is_rank_zero:
            return self.state.model, self.state.arithmetic
        whole = self._build_whole()
        load_weights(whole, Snapshot({"model": tensors}, {}))
        return whole, match_training_numerics(self.config, whole, self.material.device)

    def _tell_of_data(self, throughput: Throughput) -> None:
        """Say whether the network had to wait for its input, and list the samples that were left out."""
        share = throughput.counted.data_wait_share if throughput.counted else 0.0
        if share > DATA_BOUND_FRACTION and throughput.images_per_second:
            possible = throughput.images_per_second / (1 - min(share, 0.99))
            self.console.info(
                f"{share:.0%} of the time was spent waiting for data: the network could take {possible:,.0f} images/s; "
                "`convolve bench data` measures the input alone"
            )
        if self.loader.skipped:
            lines = "".join(f"{line}\n" for line in self.loader.skipped)
            write_file(self.folder / BAD_SAMPLES_FILE, lines.encode())

    def _figures(self, report: TrainReport, throughput: Throughput) -> dict[str, Any]:
        config = self.config
        return {
            "network": config.model.model,
            "dataset": report.dataset,
            "batch_size": config.optim.batch_size,
            "global_batch_size": config.global_batch_size,
            "device_type": self.material.device.type,
            "case_name": case_name(config.model.model, config.optim.batch_size, config.parallel.replicas, "acc"),
            "images_per_second": report.images_per_second,
            "ms_per_step": report.ms_per_step,
            "first_excluded": throughput.first_excluded,
            "data_wait_included": throughput.data_wait_included,
            "data_wait_share": throughput.counted.data_wait_share if throughput.counted else None,
            "test_accuracy": report.test_accuracy,
            "test_samples": report.test_samples,
            "final_loss": report.final_loss,
            "steps": report.steps,
            "precision": self.numerics.choice.policy.name,
            "numerics": self.numerics.facts(),
            "skipped_steps": self.state.scaler.skipped,
            "end_to_end_seconds": report.seconds,
        }


def train(config: Config, console: Console) -> TrainReport:
    """Train a config from the beginning in a folder of its own."""
    device.configure(config.run.threads)
    registry.check(config.model)
    resolve_splits(build_on_meta(config), config)
    with open_collectives(config.parallel) as team:
        require_same_start(team, config)
        console = rank_zero_console(team, console)
        folder = Path(team.broadcast_str(str(create_run_dir(config.run, config.name)) if team.is_rank_zero else ""))
        with lock_run(folder, team):
            training = Session(config, folder, console, team)
            training.write_config()
            return training.run()


def read_config(folder: Path) -> Config:
    """The resolved config of a run."""
    try:
        return parse((folder / CONFIG_FILE).read_text(encoding="utf-8"), str(folder / CONFIG_FILE))
    except OSError:
        raise CheckpointError(
            f"{folder}: not a run folder ({CONFIG_FILE} is not there); give the folder that `convolve train` named"
        ) from None


@dataclass(frozen=True)
class Changes:
    """What may differ when a run goes on: its length, and how it is laid out over processes."""

    epochs: float | None = None
    iterations: int | None = None
    parallel: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, config: Config) -> Config:
        """Return the config of the resumed run; the global batch stays the same."""
        options: dict[str, Any] = {}
        if self.epochs is not None or self.iterations is not None:
            options = {"epochs": self.epochs, "iterations": self.iterations}
        if not self.parallel:
            return config.replace(**options)
        splits = {"pipeline_splits": AUTO_SPLITS} if "shards" in self.parallel else {}
        layout = build({**config.parallel.model_dump(), **splits, **self.parallel}).parallel
        micro_batches, replicas = config.optim.gradient_accumulation_count * config.parallel.replicas, layout.replicas
        if micro_batches % replicas:
            raise ConfigError(
                f"replicas={replicas}: a step of this run has {micro_batches} micro batches, which so many replicas "
                f"cannot share evenly; choose a divisor of {micro_batches}"
            )
        options["gradient_accumulation_count"] = micro_batches // replicas
        return config.replace(**options, **layout.model_dump())


def resume(folder: Path, console: Console, changes: Changes | None = None) -> TrainReport:
    """Restore the newest good checkpoint and train on, with changes of length or layout."""
    config = (changes or Changes()).apply(read_config(folder))
    device.configure(config.run.threads)
    with open_collectives(config.parallel) as team:
        require_same_start(team, config)
        with lock_run(folder, team):
            return _continue(Session(config, folder, rank_zero_console(team, console), team))


def _continue(training: Session) -> TrainReport:
    path = training.resume()
    training.console.info(f"restored {path.name}")
    if training.team.is_rank_zero:
        truncate_after(training.folder, training.state.step)
    training.write_config()
    return training.run()
