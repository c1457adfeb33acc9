"""`convolve describe`: layers of a model by its name, config or run, and the learning-rate curve of a config or run."""

from dataclasses import dataclass
from pathlib import Path

from convolve.checkpoint.store import choose_checkpoint
from convolve.compat.config_files import load_entries, resolve
from convolve.config import Config, ModelConfig
from convolve.config.loading import read_saved
from convolve.data.build import count_used
from convolve.data.catalog import dataset_info
from convolve.engine.loop import run_samples
from convolve.errors import ConfigError
from convolve.files import write_file
from convolve.models import registry
from convolve.models.network import Shape
from convolve.models.summary import ModelSummary, draw_svg, summarize
from convolve.optim.schedules import RunSpan, build_schedule
from convolve.run_files import CONFIG_FILE
from convolve.runs.load import load_trained

DEFAULTS = ModelConfig()


def list_models() -> dict[str, str]:
    """Return every known model with a one-line summary."""
    return {name: registry.find(name).summary for name in registry.names()}


def describe_model(what: str, *, config_path: Path | None = None) -> ModelSummary:
    """Describe a model by name, a named config with the shape of its data set, or the model of a run folder."""
    if Path(what).is_dir():
        trained = load_trained(choose_checkpoint(Path(what)))
        return summarize(trained.config.model.model, trained.model)
    if registry.is_known(what) or not is_config(what, config_path):
        return describe_named(what)
    config = resolve(what, config_path).config
    entry = dataset_info(config)
    if entry is None:
        return describe_named(config.model.model, options=config.model)
    height, width, channels = entry.image_shape
    return describe_named(config.model.model, len(entry.classes), (channels, height, width), config.model)


def is_config(name: str, config_path: Path | None) -> bool:
    """Return True if a named config has this name or alias."""
    return any(name == entry.name or name in entry.also for entry in load_entries(config_path).values())


def describe_named(
    name: str, classes: int | None = None, input_shape: Shape | None = None, options: ModelConfig = DEFAULTS
) -> ModelSummary:
    """Describe a model by its name, without creating weights. Shapes default to those of the model."""
    own = registry.resolve(name, options)
    model = registry.build_meta(
        name, classes=classes or own.classes, input_shape=input_shape or own.input_shape, options=options
    )
    return summarize(name, model)


def write_svg(description: ModelSummary, path: Path) -> None:
    """Write the drawing of a model to a file."""
    write_file(path, draw_svg(description).encode("utf-8", "backslashreplace"), ConfigError)


POINTS = 201
# Training images of ImageNet, for configs without a known data set.
UNKNOWN_COUNT = 1_281_167


@dataclass(frozen=True)
class ScheduleCurve:
    """Learning rate over a run: (epoch, rate) at evenly spaced positions."""

    name: str
    schedule: str
    peak: float
    epochs: float
    global_batch_size: int
    points: tuple[tuple[float, float], ...]


def trace_schedule(what: str, *, config_path: Path | None = None) -> ScheduleCurve:
    """Return the learning-rate curve of a named config or a run folder."""
    stored = Path(what) / CONFIG_FILE
    if stored.is_file():
        return trace(read_saved(stored))
    return trace(resolve(what, config_path).config)


def trace(config: Config) -> ScheduleCurve:
    """Return the learning-rate curve of a config."""
    per_epoch = count_samples(config)
    total = run_samples(config, per_epoch)
    peak = config.resolved_optim().learning_rate
    rate = build_schedule(config.schedule, peak, RunSpan(total, per_epoch))
    positions = [round(total * index / (POINTS - 1)) for index in range(POINTS)]
    points = tuple((position / per_epoch, rate(position)) for position in positions)
    return ScheduleCurve(
        config.name, config.schedule.lr_schedule, peak, total / per_epoch, config.global_batch_size, points
    )


def count_samples(config: Config) -> int:
    """Return the training samples of an epoch without opening the data; those of ImageNet if unknown."""
    entry = dataset_info(config)
    return count_used(entry.train_count if entry else UNKNOWN_COUNT, config.data)
