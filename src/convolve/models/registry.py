"""Networks by name: those of convolve, and those that installed packages offer.

A package offers one by an entry point in the group `convolve.models` whose object is an `Architecture`. It is imported
only when its name is asked for.
"""

from importlib.metadata import EntryPoint, entry_points

from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError, suggest
from convolve.models import lenet, resnet
from convolve.models.architecture import Architecture, Order
from convolve.models.chance import Chance
from convolve.models.network import Network, Shape

GROUP = "convolve.models"

_OWN: dict[str, Architecture] = {**lenet.ARCHITECTURES, **resnet.ARCHITECTURES}


def names() -> list[str]:
    """Every known network, sorted."""
    return sorted({*_OWN, *(entry.name for entry in entry_points(group=GROUP))})


def find(name: str) -> Architecture:
    """The architecture of that name."""
    offers = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if len(offers) + (name in _OWN) > 1:
        raise ConfigError(f"model {name}: offered more than once ({_owners(name, offers)}); uninstall all but one")
    if offers:
        return _load(offers[0])
    if name not in _OWN:
        raise ConfigError(f"model {name}: no network has that name; {suggest(name, names())}")
    return _OWN[name]


def sketch(name: str, *, classes: int, input_shape: Shape, options: ModelConfig) -> Network:
    """A network without values, which costs neither time nor memory; enough to describe it."""
    architecture = find(name)
    if classes < 2:
        raise ConfigError(f"model {name} with {classes} classes: a classifier needs at least 2; check the data set")
    if min(input_shape) < 1:
        raise ConfigError(f"model {name} with input {input_shape}: channels, height and width must be at least 1")
    return architecture.sketch(Order(name, classes, input_shape, options, Chance()))


def build(name: str, *, classes: int, input_shape: Shape, seed: int, options: ModelConfig) -> Network:
    """A network with its initial weights, on the CPU in float32; equal arguments give equal bits."""
    network = sketch(name, classes=classes, input_shape=input_shape, options=options)
    return find(name).fill(network, seed)


def _owners(name: str, offers: list[EntryPoint]) -> str:
    own = ["convolve"] if name in _OWN else []
    return ", ".join(own + [entry.dist.name if entry.dist else entry.value for entry in offers])


def _load(entry: EntryPoint) -> Architecture:
    try:
        found = entry.load()
    except Exception as error:
        raise ConfigError(
            f"model {entry.name}: {entry.value} cannot be imported ({error}); mend the package"
        ) from error
    if not isinstance(found, Architecture):
        raise ConfigError(f"model {entry.name}: {entry.value} is not an Architecture; mend the package")
    return found
