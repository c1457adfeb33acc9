"""The pieces that several verbs need: the data, the network, and a trained network from a checkpoint.

The numerics of a run: how its policy is carried out, who watches, and how the loss is scaled.

What the blocks of a config's network cost in memory and time, without its data, its devices or its weights.

From the data section of a config to what feeds a network: which samples, which transform, which loader.

The pieces that several verbs need: the data, the network, and a trained network from a checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convolve import device
from convolve.checkpoint.pretrained import load_pretrained
from convolve.config import Config, ModelConfig
from convolve.data.build import DataModule, fit_normalization, load_dataset
from convolve.data.catalog import dataset_info
from convolve.data.loader.loader import Loader
from convolve.data.transforms.normalize import Transform
from convolve.loggers.base import Console
from convolve.models import registry
from convolve.models.fastnet import WHITENED_IMAGES, Whitening
from convolve.models.network import Network, Shape, apply_freezing
from convolve.numerics.emulator import Observer
from convolve.numerics.execution import Execution
from convolve.numerics.formats import FP16, FP32, Format
from convolve.numerics.loss_scaling import AnyRank, Scaler, build_scaler, single_process
from convolve.numerics.observers import ExponentSurvey, Observers, OverflowDump, OverflowTrap, StepDump, parse_steps
from convolve.numerics.select import NumericsChoice, apply_kernels, build_execution, select_numerics
from convolve.run_files import DUMPS_FOLDER


def build_model(config: Config, transform: Transform, classes: int, where: torch.device) -> Network:
    """A fresh network on its device, in the memory layout that convolutions like best."""
    network = registry.build(
        config.model.model, classes=classes, input_shape=transform.shape, seed=config.run.seed, options=config.model
    )
    apply_freezing(network, config.model)
    return network.to(device=where, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def initialize_weights(network: Network, config: Config, loader: Loader, console: Console) -> None:
    """What a new run begins with besides its seed: weights from elsewhere, and layers that look at the data."""
    for module in network.modules():
        if isinstance(module, Whitening):
            batch = next(loader.step_batches(config.run.seed, 0, WHITENED_IMAGES, WHITENED_IMAGES))
            module.fit_images(batch.micro_batches[0].images)
    if config.model.init_path is not None:
        report = load_pretrained(network, config.model.init_path)
        new = f"; newly initialized: {', '.join(report.new)}" if report.new else ""
        console.info(f"loaded {report.loaded} tensors from {report.source}{new}")


EmitEvent = Callable[..., None]


@dataclass(frozen=True)
class Numerics:
    """What was chosen for a run, and the parts that carry it out."""

    choice: NumericsChoice
    arithmetic: Execution
    scaler: Scaler

    def facts(self) -> dict[str, Any]:
        """For the record of the run."""
        return {
            **self.choice.policy.to_json(),
            "execution": self.choice.execution,
            "reason": self.choice.reason,
            "loss_scaling": type(self.scaler).__name__,
            "first_loss_scale": self.scaler.scale,
        }


def build_numerics(
    config: Config,
    where: torch.device,
    folder: Path,
    tell: EmitEvent,
    span: tuple[int, int],
    agree: AnyRank = single_process,
) -> Numerics:
    """The numerics that a config asks for; `tell` gets events, `span` is the run and one epoch in samples."""
    precision = config.precision
    watched = bool(precision.data_dump_step or precision.over_dump or precision.survey_freq)
    choice = select_numerics(precision, where, watched=watched)
    watcher = Observers(_observers(config, choice, folder / DUMPS_FOLDER, tell))
    scaler = build_scaler(precision, choice.policy, span, agree)
    return Numerics(choice, build_execution(choice, where, watcher), scaler)


def match_training_numerics(config: Config, network: Network, where: torch.device) -> Execution:
    """Prepare a trained model and return the execution in which training validated it."""
    choice = select_numerics(config.precision, where)
    execution = build_execution(choice, where)
    execution.install(network)
    apply_kernels(config, network, choice)
    return execution


def _observers(config: Config, choice: NumericsChoice, folder: Path, tell: EmitEvent) -> list[Observer]:
    precision, found = config.precision, list[Observer]()
    if precision.over_dump:
        found.append(OverflowDump(folder))
    if precision.data_dump_step:
        found.append(StepDump(folder, parse_steps(precision.data_dump_step)))
    if precision.survey_freq:
        found.append(_survey(precision.survey_freq, choice.policy.compute, tell))
    if choice.policy.exceptions:
        # Last, so that the dumps are written before it ends the run.
        found.append(OverflowTrap())
    return found


def _survey(every: int, compute: Format, tell: EmitEvent) -> ExponentSurvey:
    """A survey by the format computed in; in fp32, by the one that somebody might go to."""
    target = FP16 if compute is FP32 else compute
    limits = (1 - target.bias - target.mantissa_bits, 1 - target.bias, target.bias)
    return ExponentSurvey(
        every, target, lambda step, layers: tell("survey", step=step, format=target.name, limits=limits, layers=layers)
    )


def build_on_meta(config: Config) -> Network:
    """The network of a config without values, for the images of its data set where that is known."""
    return _build_on_meta(config.model, *_find_input(config))


def _find_input(config: Config) -> tuple[int, Shape]:
    """Classes and image shape: those of the data set, or the network's own."""
    own = registry.resolve(config.model.model, config.model)
    entry, side = dataset_info(config), config.data.image_size
    classes, shape = own.classes, own.input_shape
    if entry is not None:
        height, width, channels = entry.image_shape
        classes, shape = len(entry.classes), (channels, height, width)
    return classes, shape if side is None else (shape[0], side, side)


def _build_on_meta(options: ModelConfig, classes: int, shape: Shape) -> Network:
    network = registry.build_meta(options.model, classes=classes, input_shape=shape, options=options)
    apply_freezing(network, options)
    return network


def open_data(config: Config, console: Console) -> DataModule:
    """Device, data and transform for a training."""
    where = device.select(config.run.device)
    dataset = load_dataset(config, console)
    shape = registry.resolve(config.model.model, config.model).input_shape
    transform = fit_normalization(dataset.train, config.data, shape[1] if shape[0] == 3 else None)
    return DataModule(dataset, transform, where, config.data)
