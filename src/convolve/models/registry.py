"""Models by name: those of convolve, and those of installed packages.

A package provides a model by an entry point in the group `convolve.models` whose object is a `ModelSpec`, which is
imported only if its name is used.
"""

import re
from importlib.metadata import EntryPoint, entry_points

from convolve.config.model_options import family_of, reject_foreign_options
from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError, suggest
from convolve.models import efficientnet, efficientnet_lite, fastnet, lenet, mobilenet, resnet
from convolve.models.network import Network, Shape
from convolve.models.spec import BuildArgs, ModelSpec

GROUP = "convolve.models"

_BUILTIN: dict[str, ModelSpec] = {
    **lenet.MODELS,
    **resnet.MODELS,
    **efficientnet.MODELS,
    **efficientnet_lite.MODELS,
    **mobilenet.MODELS,
    **fastnet.MODELS,
}

_ALIASES = {"resnext50": "resnext50-32x4d", "resnext101": "resnext101-32x8d"}


def names() -> list[str]:
    """Return the names of all models, sorted."""
    return sorted({*_BUILTIN, *(entry.name for entry in entry_points(group=GROUP))})


def find(name: str) -> ModelSpec:
    """Return the spec of a model; `_` may stand for `-`, as in the names of other libraries."""
    entries = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if len(entries) + (name in _BUILTIN) > 1:
        raise ConfigError(f"model {name}: offered more than once ({_owners(name, entries)}); uninstall all but one")
    if entries:
        return _load(entries[0])
    builtin = _canonical(name)
    if builtin not in _BUILTIN:
        raise ConfigError(f"model {name}: unknown name; {_suggest_instead(builtin)}")
    return _BUILTIN[builtin]


def _canonical(name: str) -> str:
    name = name.replace("_", "-")
    return _ALIASES.get(name, name)


def is_known(name: str) -> bool:
    """Check whether a model has this name."""
    return _canonical(name) in _BUILTIN or name in names()


def resolve(name: str, options: ModelConfig) -> ModelSpec:
    """Return the spec of a model; of a family, that of the model that the options determine."""
    spec = find(name)
    member = spec.resolve(options.model_copy(update={"model": name})) if spec.resolve else None
    return spec if member is None else find(member)


def check(options: ModelConfig) -> None:
    """Reject unknown names and options that the model does not have; needs no data."""
    spec = find(options.model)
    for option in spec.fixed_options:
        if getattr(options, option) is not None:
            raise ConfigError(
                f"--{option.replace('_', '-')} {getattr(options, option)}: model {options.model} fixes this option; "
                f"omit it, or use --model {_family(options.model)}"
            )
    if spec.resolve is not None:
        spec.resolve(options)
    reject_foreign_options(options)


def build_meta(name: str, *, classes: int, input_shape: Shape, options: ModelConfig) -> Network:
    """Build a model without values, which costs neither time nor memory; enough to describe it."""
    spec = find(name)
    check(options.model_copy(update={"model": name}))
    if classes < 2:
        raise ConfigError(f"model {name} with {classes} classes: a classifier needs at least 2; check the data set")
    if min(input_shape) < 1:
        raise ConfigError(f"model {name} with input {input_shape}: channels, height and width must be at least 1")
    return spec.build_meta(BuildArgs(name, classes, input_shape, options))


def build(name: str, *, classes: int, input_shape: Shape, seed: int, options: ModelConfig) -> Network:
    """Build an initialized model on the CPU in float32; equal arguments give equal bits."""
    model = build_meta(name, classes=classes, input_shape=input_shape, options=options)
    return find(name).materialize(model, seed)


def _suggest_instead(name: str) -> str:
    """List the family that the name belongs to, by size; else similar names."""
    family = family_of(name)
    if family is None:
        return suggest(name, names())
    members = [known for known in names() if family_of(known) is family]
    members.sort(key=lambda known: [int(size) for size in re.findall(r"\d+", known)])
    return f"known of its family are {', '.join(members)}"


def _family(name: str) -> str:
    family = family_of(name)
    return name if family is None else family.family


def _owners(name: str, entries: list[EntryPoint]) -> str:
    builtin = ["convolve"] if name in _BUILTIN else []
    return ", ".join(builtin + [entry.dist.name if entry.dist else entry.value for entry in entries])


def _load(entry: EntryPoint) -> ModelSpec:
    try:
        spec = entry.load()
    except Exception as error:
        raise ConfigError(
            f"model {entry.name}: cannot import {entry.value} ({error}); fix or uninstall the package"
        ) from error
    if not isinstance(spec, ModelSpec):
        raise ConfigError(f"model {entry.name}: {entry.value} is not a ModelSpec; fix or uninstall the package")
    return spec
