"""`convolve describe`: what a network is made of, by its name, by a named config, or by a run."""

from pathlib import Path

from convolve.app.assembly import choose_checkpoint, load_trained
from convolve.config import ModelConfig
from convolve.config.loading import load_entries, resolve
from convolve.data.catalogue import MNIST, find_entry
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
    if what in load_entries(config_path) and what not in registry.names():
        config = resolve(what, config_path).config
        entry = MNIST if config.data.dataset is None else find_entry(config.data.dataset)
        height, width, channels = entry.image_shape
        shape = (channels, height, width)
        return describe_network(config.model.model, len(entry.classes), shape, config.model)
    return describe_network(what)


def describe_network(
    name: str, classes: int = 10, input_shape: Shape = (1, 28, 28), options: ModelConfig = DEFAULTS
) -> Description:
    """Describe a network by its name; its weights are never made."""
    return describe(name, registry.sketch(name, classes=classes, input_shape=input_shape, options=options))


def write_svg(description: Description, path: Path) -> None:
    """Draw a network into a file."""
    try:
        path.write_text(draw_svg(description), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; give another file") from None
