"""`convolve average`: one model from several checkpoints of a run.

Batch-norm statistics belong to the weights with which they were measured. Those of an average are measured again on
training images, unless `--statistics averaged` is given. The arithmetic of averages is in checkpoint/averaging.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from convolve.engine.state import load_weights
from convolve.engine.user_code import NO_USER_CODE, UserCode
from convolve.errors import CheckpointError, ConfigError
from convolve.layers.batch_norm import StepStatistics
from convolve.loggers.base import Console, ValidationRecord
from convolve.numerics.execution import Execution
from convolve.run_files import AVERAGES_FOLDER, step_of
from convolve.runs.load import TrainedModel, load_trained
from convolve.runs.validate import validate_one

Mode = Literal["mean", "exponential", "ema"]
Statistics = Literal["measured", "averaged"]
STATISTICS_SAMPLES = 10_000
STATISTICS_BATCH = 250


@dataclass(frozen=True)
class AverageRecipe:
    """What to average: the last `count` checkpoints (None: all), without the newest `discard_last`."""

    mode: Mode
    count: int | None = None
    decay: float = 0.99
    discard_last: int = 0
    statistics: Statistics = "measured"

    @property
    def name(self) -> str:
        """Name of the folder of the average."""
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
    """Result of averaging: the saved average, its checkpoints and its validation."""

    path: Path
    checkpoints: list[str]
    statistics: str
    validation: ValidationRecord | None

    def __fspath__(self) -> str:
        return str(self.path)


def average(
    folder: Path,
    recipe: AverageRecipe,
    console: Console,
    *,
    name: str | None = None,
    user: UserCode = NO_USER_CODE,
) -> AverageReport:
    """Average the checkpoints of a run, measure batch-norm statistics, save and validate the result."""
    paths = choose_checkpoints(find_checkpoints(folder), recipe)
    trained = load_trained(paths[-1], user=user)
    config = trained.config
    device.configure(config.run.threads)
    dataset = load_dataset(config, console, user.data)
    data = DataModule(dataset, trained.transform, device.select(config.run.device), config.data, user.augment)
    return _save_average(folder / AVERAGES_FOLDER / (name or recipe.name), paths, recipe, trained, data)


def choose_checkpoints(paths: list[Path], recipe: AverageRecipe) -> list[Path]:
    """Return the checkpoints of a recipe, oldest first."""
    chosen = paths[: len(paths) - recipe.discard_last] if recipe.discard_last < len(paths) else []
    if recipe.mode == "ema":
        chosen = chosen[-1:]
    elif recipe.count is not None:
        chosen = chosen[-recipe.count :]
    if not chosen:
        raise ConfigError(
            f"--discard-last {recipe.discard_last}: the run has {len(paths)} checkpoints; keep at least one"
        )
    return chosen


def _compute(paths: list[Path], recipe: AverageRecipe) -> Snapshot:
    newest = load(paths[-1])
    weights = _ema_weights(newest, paths[-1]) if recipe.mode == "ema" else _blend(paths, recipe)
    metadata: dict[str, object] = {"averaged": [path.name for path in paths], "averaging": recipe.name}
    return replace_weights(newest, weights, metadata)


def _blend(paths: list[Path], recipe: AverageRecipe) -> dict[str, torch.Tensor]:
    blend = mean if recipe.mode == "mean" else exponential(recipe.decay)
    return average_weights((load(path) for path in paths), blend)


def _ema_weights(newest: Snapshot, path: Path) -> dict[str, torch.Tensor]:
    if "averages" not in newest.tensors:
        raise CheckpointError(f"{path}: contains no running average; train with --ema-decay")
    return {**newest.tensors["model"], **newest.tensors["averages"]}


def _save_average(
    target: Path, paths: list[Path], recipe: AverageRecipe, newest: TrainedModel, data: DataModule
) -> AverageReport:
    """Compute an average, measure its batch-norm statistics if requested, validate it, and save it last: what is saved
    is complete. The model of the newest checkpoint gets its weights."""
    snapshot = _compute(paths, recipe)
    load_weights(newest.model, snapshot)
    trained = replace(newest, path=target)
    statistics = "none"
    if batch_norms(trained.model):
        # A running average includes the statistics, which match its weights closely.
        statistics = "averaged" if recipe.mode == "ema" else recipe.statistics
    if statistics == "measured":
        execution = match_training_numerics(trained.config, trained.model, data.device)
        reestimate_batch_norm(trained.model, data.train_loader(), trained.config.run.seed, execution)
        snapshot.tensors["model"] = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    record = validate_one(trained, data, fit=True)
    if record.labels:
        snapshot.state["thresholds"] = [score.threshold for score in record.labels]
    save_average(target.parent.parent, target.name, snapshot)
    return AverageReport(target, [path.name for path in paths], statistics, record)


def batch_norms(model: nn.Module) -> list[StepStatistics]:
    """Return the batch-norm layers of a model."""
    return [module for module in model.modules() if isinstance(module, StepStatistics)]


def reestimate_batch_norm(model: nn.Module, loader: Loader, seed: int, execution: Execution) -> None:
    """Set batch-norm statistics to their mean over training images, augmented as in training."""
    norms = batch_norms(model)
    with eval_mode(model):
        for norm in norms:
            norm.train()
        for images in _some_images(loader, seed):
            execution.forward(model, images)
    for norm in norms:
        if norm.has_sums:
            norm.update_running_stats(norm.take_sums(), momentum=1.0)
        norm.eval()


def _some_images(loader: Loader, seed: int) -> Iterable[torch.Tensor]:
    seen = 0
    for batch in loader.step_batches(seed, 0, STATISTICS_BATCH, STATISTICS_BATCH):
        for micro_batch in batch.micro_batches:
            yield micro_batch.images
        seen += batch.global_samples
        if seen >= min(len(loader), STATISTICS_SAMPLES):
            return


def average_at_end(
    folder: Path, paths: list[Path], config: Config, data: DataModule, user: UserCode = NO_USER_CODE
) -> list[AverageReport]:
    """Save and validate the averages of a config at the end of training: of the last N epochs, and exponential."""
    steps_per_epoch = -(-len(data.dataset.train) // config.global_batch_size)
    recipes: list[tuple[str, AverageRecipe]] = []
    for epochs in config.optim.weight_avg_n:
        steps = [step_of(path) for path in paths]
        count = sum(step > steps[-1] - epochs * steps_per_epoch for step in steps)
        recipes.append((f"mean-{epochs}-epochs", AverageRecipe("mean", count)))
    for decay in config.optim.weight_avg_exp:
        recipe = AverageRecipe("exponential", decay=decay)
        recipes.append((recipe.name, recipe))
    if config.optim.ema_decay is not None and not config.run.select_ema:
        recipes.append(("ema", AverageRecipe("ema")))
    reports = []
    for name, recipe in recipes:
        chosen = choose_checkpoints(paths, recipe)
        newest = load_trained(chosen[-1], user=user)
        reports.append(_save_average(folder / AVERAGES_FOLDER / name, chosen, recipe, newest, data))
    return reports
