"""`convolve average`: one network from several checkpoints of a run.

Batch-norm statistics belong to the weights that they were measured with. Those of an average are therefore measured
again, on training images, unless the average of the statistics is asked for.

Averages of checkpoints: a mean or an exponential one, computed in float64 and stored in each tensor's own format.

    mean           (c_1 + ... + c_n) / n
    exponential    a := c_1;  a := d a + (1 - d) c_i  for i = 2 ... n

An average is a checkpoint of its own, in `averages/<name>` of the run, without optimizer state. Norm statistics are
averaged here like all else, which is only roughly right for batch norm: whoever has data re-estimates them afterwards.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from convolve import device
from convolve.checkpoint.averaging import average_weights, exponential, mean, replace_weights, save_average
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import find_checkpoints, load
from convolve.config import Config
from convolve.data.build import DataModule, load_dataset
from convolve.data.loader.loader import Loader
from convolve.engine.build import match_training_numerics
from convolve.engine.evaluate import eval_mode
from convolve.errors import CheckpointError, ConfigError
from convolve.layers.batch_norm import BatchNorm2d
from convolve.loggers.base import Console, ValidationRecord
from convolve.numerics.execution import Execution
from convolve.run_files import step_of
from convolve.runs.load import TrainedModel, load_trained
from convolve.runs.validate import validate_one

Mode = Literal["mean", "exponential", "ema"]
Statistics = Literal["measured", "averaged"]
STATISTICS_SAMPLES = 10_000
STATISTICS_BATCH = 250


@dataclass(frozen=True)
class AverageRecipe:
    """How an average is made: the last `count` checkpoints (None: all) before the last `discard_last`."""

    mode: Mode
    count: int | None = None
    decay: float = 0.99
    discard_last: int = 0
    statistics: Statistics = "measured"

    @property
    def name(self) -> str:
        """The folder that the average is stored in."""
        parts: list[str] = [self.mode]
        if self.mode == "exponential":
            parts.append(f"{self.decay:g}")
        if self.count is not None:
            parts.append(f"last-{self.count}")
        if self.discard_last:
            parts.append(f"without-{self.discard_last}")
        return "-".join(parts)


@dataclass(frozen=True)
class AverageReport:
    """Where an average is, what went into it, and how it validates."""

    path: Path
    checkpoints: list[str]
    statistics: str
    validation: ValidationRecord | None


def average(folder: Path, recipe: AverageRecipe, console: Console, *, name: str | None = None) -> AverageReport:
    """Average the checkpoints of a run, measure batch-norm statistics, store and validate the result."""
    paths = choose_checkpoints(find_checkpoints(folder), recipe)
    saved = save_average_of(folder, paths, recipe, name)
    trained = load_trained(saved)
    config = trained.config
    device.configure(config.run.threads)
    material = DataModule(
        load_dataset(config, console), trained.transform, device.select(config.run.device), config.data
    )
    return finish_average(saved, paths, recipe, trained, material)


def choose_checkpoints(paths: list[Path], recipe: AverageRecipe) -> list[Path]:
    """The checkpoints that a recipe means, oldest first."""
    kept = paths[: len(paths) - recipe.discard_last] if recipe.discard_last < len(paths) else []
    if recipe.mode == "ema":
        kept = kept[-1:]
    elif recipe.count is not None:
        kept = kept[-recipe.count :]
    if not kept:
        raise ConfigError(
            f"discard-last={recipe.discard_last}: the run has {len(paths)} checkpoints; leave one at least"
        )
    return kept


def save_average_of(folder: Path, paths: list[Path], recipe: AverageRecipe, name: str | None = None) -> Path:
    """Compute an average and store it in the run."""
    newest = load(paths[-1])
    weights = _ema_weights(newest, paths[-1]) if recipe.mode == "ema" else _blend(paths, recipe)
    facts = {"averaged": [path.name for path in paths], "averaging": recipe.name}
    snapshot = replace_weights(newest, weights, dict(facts))
    return save_average(folder, name or recipe.name, snapshot)


def _blend(paths: list[Path], recipe: AverageRecipe) -> dict[str, torch.Tensor]:
    blend = mean if recipe.mode == "mean" else exponential(recipe.decay)
    return average_weights((load(path) for path in paths), blend)


def _ema_weights(newest: Snapshot, path: Path) -> dict[str, torch.Tensor]:
    if "averages" not in newest.tensors:
        raise CheckpointError(f"{path}: holds no running average; train with --ema-decay to have one")
    return {**newest.tensors["model"], **newest.tensors["averages"]}


def finish_average(
    saved: Path, paths: list[Path], recipe: AverageRecipe, trained: TrainedModel, material: DataModule
) -> AverageReport:
    """Measure the statistics of an average if they are to be, and validate it."""
    statistics = "none"
    if batch_norms(trained.network):
        # A running average holds statistics of nearly its own weights already.
        statistics = "averaged" if recipe.mode == "ema" else recipe.statistics
    if statistics == "measured":
        execution = match_training_numerics(trained.config, trained.network, material.device)
        reestimate_batch_norm(trained.network, material.train_loader(), trained.config.run.seed, execution)
        snapshot = load(saved)
        snapshot.tensors["model"] = dict(trained.network.state_dict())
        save_average(saved.parent.parent, saved.name, snapshot)
    return AverageReport(saved, [path.name for path in paths], statistics, validate_one(trained, material))


def batch_norms(network: nn.Module) -> list[BatchNorm2d]:
    """The layers whose statistics belong to certain weights."""
    return [module for module in network.modules() if isinstance(module, BatchNorm2d)]


def reestimate_batch_norm(network: nn.Module, loader: Loader, seed: int, execution: Execution) -> None:
    """Plain means of batch-norm statistics over training images, as the network sees them in training."""
    norms = batch_norms(network)
    with eval_mode(network):
        for norm in norms:
            norm.train()
        for images in _some_images(loader, seed):
            execution.forward(network, images)
    for norm in norms:
        norm.settle(norm.take_sums(), momentum=1.0)
        norm.eval()


def _some_images(loader: Loader, seed: int) -> Iterable[torch.Tensor]:
    seen = 0
    for batch in loader.step_batches(seed, 0, STATISTICS_BATCH, STATISTICS_BATCH):
        for micro_batch in batch.micro_batches:
            yield micro_batch.images
        seen += batch.global_samples
        if seen >= min(len(loader), STATISTICS_SAMPLES):
            return


def average_at_end(folder: Path, paths: list[Path], config: Config, material: DataModule) -> list[AverageReport]:
    """The averages that a config asks for at the end of training: of the last N epochs, and exponential ones."""
    steps_per_epoch = -(-len(material.dataset.train) // config.global_batch_size)
    recipes: list[tuple[str, AverageRecipe]] = []
    for epochs in config.optim.weight_avg_n:
        steps = [step_of(path) for path in paths]
        count = sum(step > steps[-1] - epochs * steps_per_epoch for step in steps)
        recipes.append((f"mean-{epochs}-epochs", AverageRecipe("mean", count)))
    for decay in config.optim.weight_avg_exp:
        recipe = AverageRecipe("exponential", decay=decay)
        recipes.append((recipe.name, recipe))
    if config.optim.ema_decay is not None:
        recipes.append(("ema", AverageRecipe("ema")))
    return [_average_one(folder, paths, name, recipe, material) for name, recipe in recipes]


def _average_one(
    folder: Path, paths: list[Path], name: str, recipe: AverageRecipe, material: DataModule
) -> AverageReport:
    chosen = choose_checkpoints(paths, recipe)
    saved = save_average_of(folder, chosen, recipe, name)
    return finish_average(saved, chosen, recipe, load_trained(saved), material)
