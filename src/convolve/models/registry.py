"""Networks by name: those of convolve, and those that installed packages offer.

A package offers one by an entry point in the group `convolve.models` whose object is an `Architecture`. It is imported
only when its name is asked for.
"""

import re
from importlib.metadata import EntryPoint, entry_points

from convolve.config.model_options import family_of, reject_foreign_options
from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError, suggest
from convolve.models import efficientnet, fastnet, lenet, mobilenet, resnet
from convolve.models.network import Network, Shape
from convolve.models.spec import BuildArgs, ModelSpec

GROUP = "convolve.models"

_BUILTIN: dict[str, ModelSpec] = {
    **lenet.MODELS,
    **resnet.MODELS,
    **efficientnet.MODELS,
    **mobilenet.MODELS,
    **fastnet.MODELS,
}

_ALIASES = {"resnext50": "resnext50-32x4d", "resnext101": "resnext101-32x8d"}


def names() -> list[str]:
    """Every known network, sorted."""
    return sorted({*_BUILTIN, *(entry.name for entry in entry_points(group=GROUP))})


def find(name: str) -> ModelSpec:
    """The architecture of that name; `_` may stand for `-`, as in the names of other libraries."""
    offers = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if len(offers) + (name in _BUILTIN) > 1:
        raise ConfigError(f"model {name}: offered more than once ({_owners(name, offers)}); uninstall all but one")
    if offers:
        return _load(offers[0])
    own = name.replace("_", "-")
    own = _ALIASES.get(own, own)
    if own not in _BUILTIN:
        raise ConfigError(f"model {name}: no network has that name; {_suggest_instead(own)}")
    return _BUILTIN[own]


def is_known(name: str) -> bool:
    """Whether a network has this name."""
    own = name.replace("_", "-")
    return own in _BUILTIN or own in _ALIASES or name in names()


def resolve(name: str, options: ModelConfig) -> ModelSpec:
    """The architecture itself, or the one that a family's name and the options mean; tells shapes and classes."""
    architecture = find(name)
    meant = architecture.resolve(options.model_copy(update={"model": name})) if architecture.resolve else None
    return architecture if meant is None else find(meant)


def check(options: ModelConfig) -> None:
    """Refuse what can be refused before any data are there: unknown names and options that the network has not."""
    architecture = find(options.model)
    for option in architecture.settled:
        if getattr(options, option) is not None:
            raise ConfigError(
                f"{option.replace('_', '-')}={getattr(options, option)} with model={options.model}: the name says it "
                f"already; leave it out, or use the family's name, {_family(options.model)}"
            )
    if architecture.resolve is not None:
        architecture.resolve(options)
    reject_foreign_options(options)


def build_meta(name: str, *, classes: int, input_shape: Shape, options: ModelConfig) -> Network:
    """A network without values, which costs neither time nor memory; enough to describe it."""
    architecture = find(name)
    check(options.model_copy(update={"model": name}))
    if classes < 2:
        raise ConfigError(f"model {name} with {classes} classes: a classifier needs at least 2; check the data set")
    if min(input_shape) < 1:
        raise ConfigError(f"model {name} with input {input_shape}: channels, height and width must be at least 1")
    return architecture.sketch(BuildArgs(name, classes, input_shape, options))


def build(name: str, *, classes: int, input_shape: Shape, seed: int, options: ModelConfig) -> Network:
    """A network with its initial weights, on the CPU in float32; equal arguments give equal bits."""
    network = build_meta(name, classes=classes, input_shape=input_shape, options=options)
    return find(name).fill(network, seed)


def _suggest_instead(name: str) -> str:
    """All of the family that the name belongs to, by size; else what is spelled like it."""
    family = family_of(name)
    if family is None:
        return suggest(name, names())
    members = [known for known in names() if family_of(known) is family]
    members.sort(key=lambda known: [int(size) for size in re.findall(r"\d+", known)])
    return f"known of its family are {', '.join(members)}"


def _family(name: str) -> str:
    family = family_of(name)
    return name if family is None else family.name


def _owners(name: str, offers: list[EntryPoint]) -> str:
    own = ["convolve"] if name in _BUILTIN else []
    return ", ".join(own + [entry.dist.name if entry.dist else entry.value for entry in offers])


def _load(entry: EntryPoint) -> ModelSpec:
    try:
        found = entry.load()
    except Exception as error:
        raise ConfigError(
            f"model {entry.name}: {entry.value} cannot be imported ({error}); mend the package"
        ) from error
    if not isinstance(found, ModelSpec):
        raise ConfigError(f"model {entry.name}: {entry.value} is not a ModelSpec; fix or uninstall the package")
    return found
