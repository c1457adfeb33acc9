"""`convolve describe`: what a network is made of, by its name, by a named config, or by a run."""

from pathlib import Path

from convolve.app.assembly import choose_checkpoint, load_trained
from convolve.config import Config, ModelConfig
from convolve.config.loading import load_entries, resolve
from convolve.data.catalogue import KNOWN, OTHER_NAMES, Entry
from convolve.errors import ConfigError
from convolve.models import registry
from convolve.models.anatomy import Description, describe
from convolve.models.drawing import draw_svg
from convolve.models.network import Shape

DEFAULTS = ModelConfig()


def list_networks() -> dict[str, str]:
    """Every known network with a line about it."""
    return {name: registry.find(name).summary for name in registry.names()}


def run(what: str, *, config_path: Path | None = None) -> Description:
    """Describe a network name, a named config with its data set's shape, or the network of a run folder."""
    if Path(what).is_dir():
        trained = load_trained(choose_checkpoint(Path(what)))
        return describe(trained.config.model.model, trained.network)
    if registry.is_known(what) or not is_config(what, config_path):
        return describe_network(what)
    config = resolve(what, config_path).config
    entry = known_dataset(config)
    if entry is None:
        return describe_network(config.model.model, options=config.model)
    height, width, channels = entry.image_shape
    return describe_network(config.model.model, len(entry.classes), (channels, height, width), config.model)


def is_config(name: str, config_path: Path | None) -> bool:
    """Whether a named config has this name, or had it in the system that it comes from."""
    return any(name == entry.name or name in entry.also for entry in load_entries(config_path).values())


def known_dataset(config: Config) -> Entry | None:
    """What is known beforehand about the data of a config; None leaves the network's own input shape."""
    name = config.data.dataset
    return None if name is None else KNOWN.get(OTHER_NAMES.get(name, name))


def describe_network(
    name: str, classes: int | None = None, input_shape: Shape | None = None, options: ModelConfig = DEFAULTS
) -> Description:
    """Describe a network by its name; its weights are never made. Unset shapes are the network's own."""
    own = registry.settle(name, options)
    network = registry.sketch(
        name, classes=classes or own.classes, input_shape=input_shape or own.input_shape, options=options
    )
    return describe(name, network)


def write_svg(description: Description, path: Path) -> None:
    """Draw a network into a file."""
    try:
        path.write_text(draw_svg(description), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; give another file") from None
