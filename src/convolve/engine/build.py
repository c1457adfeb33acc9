"""From a config to the parts of a run: data, model, numerics, and the state and step built from them.

`build` assembles a training step. It is pure: it reads and writes no files and prints nothing. Train, restore, bench
and align all use it. `open_data` and `build_initial_model` do the I/O that has to come first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch

from convolve import device
from convolve.checkpoint.fetch import WeightsFile
from convolve.checkpoint.pretrained import load_pretrained
from convolve.config import Config, ModelConfig, OptimConfig
from convolve.data.build import DataModule, fit_normalization, load_dataset
from convolve.data.catalog import dataset_info
from convolve.data.dataset import Labels, Task
from convolve.data.sampling import resolve_class_weights
from convolve.data.transforms.normalize import Transform
from convolve.distributed import gradient_sync, stop_votes
from convolve.distributed.collectives import Collectives
from convolve.distributed.gradient_sync import GradientSync
from convolve.distributed.node_sum import SumLayout
from convolve.distributed.partition import Partition, partition_model
from convolve.engine.data_choice import follow_data_and_model
from convolve.engine.ema import ModelEMA
from convolve.engine.forward_backward import ForwardBackward, ForwardBackwardFn, PassContext, PipelineForwardBackward
from convolve.engine.loop import run_samples
from convolve.engine.metrics import BinaryCrossEntropy, CrossEntropy, LossFn, Metrics, NullMetrics, RunningMetrics
from convolve.engine.objective import Objective, UserLoss, check_loss, measure_metrics
from convolve.engine.state import TrainState
from convolve.engine.step import (
    StepParts,
    UnfreezeFn,
    clip_to_norm,
    keyed_update,
    no_clipping,
    train_all,
    update_weights,
)
from convolve.engine.tasks import CORRECT, check_task
from convolve.engine.user_code import NO_USER_CODE, UserCode
from convolve.engine.verification import NoVerification, StepVerification, Verification
from convolve.errors import ConfigError
from convolve.layers.batch_norm import NormStatistics
from convolve.loggers.base import Console
from convolve.loggers.run_lines import join_lines
from convolve.models import registry
from convolve.models.fastnet import WHITENED_IMAGES, Whitening
from convolve.models.network import Network, Shape, apply_freezing, layer_rates
from convolve.models.unfreezing import GradualUnfreezing
from convolve.numerics.emulator import Observer
from convolve.numerics.execution import Execution
from convolve.numerics.formats import FP16, FP32, Format
from convolve.numerics.loss_scaling import AnyRank, Scaler, build_scaler, single_process
from convolve.numerics.observers import ExponentSurvey, Observers, OverflowDump, OverflowTrap, StepDump, parse_steps
from convolve.numerics.select import NumericsChoice, apply_kernels, build_execution, select_numerics
from convolve.optim.optimizers import build_optimizer, select_optimizer
from convolve.optim.schedules import RunSpan, build_schedule
from convolve.run_files import DUMPS_FOLDER

EmitFn = Callable[..., None]


class _CommonParts(TypedDict):
    loss: LossFn
    context: PassContext
    metrics: Metrics
    verification: Verification


def open_data(config: Config, console: Console, user: UserCode = NO_USER_CODE) -> DataModule:
    """Find or download the data set of a config, or take the user's, and fit its normalization."""
    target = device.select(config.run.device)
    if user.data is None and user.module is None:
        config = follow_data_and_model(config)
    dataset = load_dataset(config, console, user.data)
    check_task(config, dataset.task)
    shape = _usual_shape(config, user)
    photo_size = shape[1] if shape is not None and shape[0] == 3 else None
    transform = fit_normalization(dataset.train, config.data, photo_size)
    return DataModule(dataset, transform, target, config.data, user.augment)


def _usual_shape(config: Config, user: UserCode) -> Shape | None:
    if user.module is not None:
        return user.module.input_shape
    return registry.resolve(config.model.model, config.model).input_shape


def build_model(
    config: Config, transform: Transform, classes: int, device: torch.device, user: UserCode = NO_USER_CODE
) -> Network:
    """Return the user's module, or a freshly initialized model by name, in channels-last memory format."""
    if user.module is not None:
        model = user.module.build(classes, transform.shape, config.run.seed)
    else:
        model = registry.build(
            config.model.model, classes=classes, input_shape=transform.shape, seed=config.run.seed, options=config.model
        )
    apply_freezing(model, config.model)
    return model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def build_initial_model(
    config: Config,
    data: DataModule,
    console: Console,
    user: UserCode = NO_USER_CODE,
    weights: WeightsFile | None = None,
) -> Network:
    """Return the whole model of a new run: layers fitted to the data, initial weights loaded."""
    model = build_model(config, data.transform, len(data.dataset.classes), data.device, user)
    for module in model.modules():
        if isinstance(module, Whitening):
            batch = next(data.train_loader().step_batches(config.run.seed, 0, WHITENED_IMAGES, WHITENED_IMAGES))
            module.fit_images(batch.micro_batches[0].images)
    if weights is not None:
        report = load_pretrained(model, weights.path)
        loaded = f"loaded {report.loaded} tensors from {weights.name}"
        console.info(join_lines(loaded, f"newly initialized: {', '.join(report.new)}") if report.new else loaded)
    return model


@dataclass(frozen=True)
class Numerics:
    """Number formats of a run: the choice, and the objects that execute it."""

    choice: NumericsChoice
    execution: Execution
    scaler: Scaler
    first_loss_scale: float

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the run's log and summary."""
        return {
            **self.choice.policy.to_json(),
            "execution": self.choice.execution,
            "reason": self.choice.reason,
            "loss_scaling": type(self.scaler).__name__,
            "first_loss_scale": self.first_loss_scale,
        }


def build_numerics(
    config: Config,
    device: torch.device,
    span: RunSpan,
    *,
    folder: Path,
    emit: EmitFn = lambda kind, **values: None,
    any_rank: AnyRank = single_process,
) -> Numerics:
    """Return the numerics of a config. Dumps go to the run folder, events to `emit` (by default nowhere)."""
    precision = config.precision
    observed = bool(precision.data_dump_step or precision.over_dump or precision.survey_freq)
    choice = select_numerics(precision, device, watched=observed)
    observers = Observers(_observers(config, choice, folder / DUMPS_FOLDER, emit))
    scaler = build_scaler(precision, choice.policy, (span.total, span.epoch), any_rank)
    return Numerics(choice, build_execution(choice, device, observers), scaler, scaler.scale)


def match_training_numerics(config: Config, model: Network, device: torch.device) -> Execution:
    """Prepare a trained model and return the execution in which training validated it."""
    choice = select_numerics(config.precision, device)
    execution = build_execution(choice, device)
    execution.install(model)
    apply_kernels(config, model, choice)
    return execution


def _observers(config: Config, choice: NumericsChoice, folder: Path, emit: EmitFn) -> list[Observer]:
    precision, observers = config.precision, list[Observer]()
    if precision.over_dump:
        observers.append(OverflowDump(folder))
    if precision.data_dump_step:
        observers.append(StepDump(folder, parse_steps(precision.data_dump_step)))
    if precision.survey_freq:
        observers.append(_survey(precision.survey_freq, choice.policy.compute, emit))
    if choice.policy.exceptions:
        # Must be last: it ends the run, after the dumps have been written.
        observers.append(OverflowTrap())
    return observers


def _survey(every: int, compute: Format, emit: EmitFn) -> ExponentSurvey:
    """Return a survey of exponents by the limits of the compute format; in fp32, by those of fp16."""
    target = FP16 if compute is FP32 else compute
    limits = (1 - target.bias - target.mantissa_bits, 1 - target.bias, target.bias)
    return ExponentSurvey(
        every, target, lambda step, layers: emit("survey", step=step, format=target.name, limits=limits, layers=layers)
    )


def run_span(config: Config, data: DataModule) -> RunSpan:
    """Return the length of a run and of one epoch, in samples."""
    samples_per_epoch = len(data.dataset.train)
    return RunSpan(run_samples(config, samples_per_epoch), samples_per_epoch)


def build(
    *,
    config: Config,
    data: DataModule,
    collectives: Collectives,
    numerics: Numerics,
    model: Network | None = None,
    span: RunSpan | None = None,
    user: UserCode = NO_USER_CODE,
) -> tuple[TrainState, StepParts]:
    """Return the state at the start of a run and the parts of its step. Has no side effects.

    Args:
        model: whole model, before it is split into stages; a fresh one by default.
        span: length of the learning-rate schedule; that of the run by default.
        user: the user's module, loss, metrics and optimizer.
    """
    if model is None:
        model = build_model(config, data.transform, len(data.dataset.classes), data.device, user)
    partition = partition_model(model, config, collectives)
    state = _build_state(config, partition, numerics, user)
    numerics.execution.install(state.model)
    native_layers = apply_kernels(config, state.model, numerics.choice)
    numerics.execution.round_initial_weights()
    dataset, identical = data.dataset, config.parallel.identical_replica_seeding
    objective = build_objective(config, user, dataset.classes, dataset.train.labels, dataset.task)
    running = RunningMetrics(data.device, collectives, objective.metrics, objective.correct)
    metrics: Metrics = running if config.log.metrics else NullMetrics()
    grad_sync = _build_grad_sync(config, collectives, state)
    context = PassContext(config.run.seed, numerics.execution, grad_sync, identical, partition.span)
    verification = _build_verification(config, collectives, state)
    optim, pipeline, span = config.resolved_optim(), partition.pipeline, span or run_span(config, data)
    parts = StepParts(
        schedule=build_schedule(config.schedule, optim.learning_rate, span),
        forward_backward=_build_forward_backward(partition, context, metrics, objective, verification),
        unfreeze=_build_unfreezing(optim, state.model, span),
        clip=no_clipping if optim.clip_norm is None else clip_to_norm(optim.clip_norm, collectives),
        update=keyed_update(config.run.seed) if state.any_slot_shape else update_weights,
        seed=config.run.seed,
        collectives=collectives,
        grad_sync=grad_sync,
        stop_votes=stop_votes.build(collectives, data.device),
        sharding=partition.shard.sharding,
        metrics=metrics,
        objective=objective,
        verification=verification,
        native_layers=tuple(native_layers),
        infer=partial(pipeline.infer, forward=partial(numerics.execution.forward, state.model)) if pipeline else None,
    )
    return state, parts


def _build_unfreezing(optim: OptimConfig, model: Network, span: RunSpan) -> UnfreezeFn:
    if optim.unfreeze_epochs is None:
        return train_all
    return GradualUnfreezing(model, round(optim.unfreeze_epochs * span.epoch))


def _build_grad_sync(config: Config, collectives: Collectives, state: TrainState) -> GradientSync:
    replicas, optim = collectives.topology.replicas, config.optim
    layout = SumLayout(replicas, optim.gradient_accumulation_count, config.parallel.bn_span, optim.batch_size)
    # The payload of a step: batch-norm statistics and the stop flag.
    payload_size = len(NormStatistics(state.model).pending_sums) + 1
    return gradient_sync.build(collectives, state.model, payload_size, layout, state.execution)


def _build_verification(config: Config, collectives: Collectives, state: TrainState) -> Verification:
    if not config.run.verify_steps:
        return NoVerification()
    return StepVerification(state.model, collectives, config.run.seed, config.parallel.bn_span)


def _build_state(config: Config, partition: Partition, numerics: Numerics, user: UserCode) -> TrainState:
    model, shard, optim = partition.part, partition.shard, config.resolved_optim()
    rates = layer_rates(model, optim.layer_decay)
    own = select_optimizer(optim, user.optimizer)
    optimizer = build_optimizer(model, optim, shard.sharding.owns, lambda name: rates.get(name, 1.0), own)
    state = TrainState(
        model,
        optimizer,
        execution=numerics.execution,
        scaler=numerics.scaler,
        shard=shard,
        any_slot_shape=own is not None,
    )
    if config.optim.ema_decay is not None:
        state.ema = ModelEMA(model, config.optim.ema_decay)
    return state


def build_objective(
    config: Config,
    user: UserCode,
    classes: Sequence[str],
    labels: Labels | None = None,
    task: Task = "single-label",
) -> Objective:
    """Return loss and metrics: the user's, or those of the task. Class weights follow from the training labels; without
    them, the loss of training is not weighted."""
    metrics, optim = measure_metrics(user.metrics, len(classes), task), config.optim
    correct, names = CORRECT[task], tuple(classes) if task == "multi-label" else ()
    weights = None if labels is None else resolve_class_weights(optim.class_weights, labels, classes)
    if user.loss is None:
        if task == "multi-label":
            return Objective(BinaryCrossEntropy(), BinaryCrossEntropy(), metrics, correct, names)
        by_class = None if weights is None else torch.from_numpy(weights)
        loss = CrossEntropy(optim.label_smoothing, optim.label_smoothing_over, by_class)
        return Objective(loss, CrossEntropy(), metrics, correct)
    if weights is not None:
        raise ConfigError(
            f"--class-weights {' '.join(optim.class_weights)}: applies to the built-in cross-entropy only; omit it, or "
            "weight the samples in your loss"
        )
    if config.optim.label_smoothing:
        raise ConfigError(
            f"--label-smoothing {config.optim.label_smoothing:g}: applies to the built-in cross-entropy only; "
            "omit it, or smooth the labels in your loss"
        )
    check_loss(user.loss, len(classes), task)
    own = UserLoss(user.loss)
    return Objective(own, own, metrics, correct, names)


def _build_forward_backward(
    partition: Partition, context: PassContext, metrics: Metrics, objective: Objective, verification: Verification
) -> ForwardBackwardFn:
    model, pipeline = partition.part, partition.pipeline
    common: _CommonParts = {
        "loss": objective.loss,
        "context": context,
        "metrics": metrics,
        "verification": verification,
    }
    if pipeline is None:
        return ForwardBackward(model=model, **common)
    return PipelineForwardBackward(stage=model, pipeline=pipeline, **common)


def build_on_meta(config: Config) -> Network:
    """Return the model of a config without weights, for the image shape of its data set if that is known."""
    return build_options_on_meta(config.model, *model_input(config))


def model_input(config: Config) -> tuple[int, Shape]:
    """Return classes and image shape: those of the data set if it is known, else the model's defaults."""
    defaults = registry.resolve(config.model.model, config.model)
    config = follow_data_and_model(config)
    info, side = dataset_info(config), config.data.image_size
    classes, shape = defaults.classes, defaults.input_shape
    if info is not None:
        height, width, channels = info.image_shape
        classes, shape = len(info.classes), (channels, height, width)
    return classes, shape if side is None else (shape[0], side, side)


def build_options_on_meta(options: ModelConfig, classes: int, shape: Shape) -> Network:
    """Return a model without weights."""
    model = registry.build_meta(options.model, classes=classes, input_shape=shape, options=options)
    apply_freezing(model, options)
    return model
