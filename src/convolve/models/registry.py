"""Models by name: those of convolve, of plugins and installed packages, of timm and torchvision, and user code.

A plugin file registers a model by a decorator. A package provides one by an entry point in the group `convolve.models`,
which is imported only if its name is used. The object is a `ModelSpec`, or a class or function that makes an
`nn.Module`. `timm:NAME` and `torchvision:NAME` need these packages. Any other name with a colon is `package:attribute`.
"""

import re

from convolve import plugins
from convolve.config.model_options import family_of, reject_foreign_options
from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError, suggest
from convolve.models import efficientnet, efficientnet_lite, fastnet, lenet, mobilenet, resnet
from convolve.models.foreign import LIBRARIES, ModuleSpec, library_spec, spec_of
from convolve.models.network import Network, Shape
from convolve.models.registration import RegisteredModel
from convolve.models.spec import BuildArgs, ModelSpec

AnySpec = ModelSpec | ModuleSpec

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
    """Return the names of all models of convolve and of plugins, sorted."""
    return sorted({*_BUILTIN, *plugins.MODELS.names()})


def find(name: str) -> AnySpec:
    """Return the spec of a model; `_` may stand for `-`, as in the names of other libraries."""
    if name.partition(":")[0] in LIBRARIES and ":" in name:
        return library_spec(name)
    if ":" in name:
        return _as_spec(name, plugins.import_attribute("model", name))
    found = plugins.MODELS.find(name, _BUILTIN.get(name))
    builtin = canonical(name)
    if found is None and builtin not in _BUILTIN:
        raise ConfigError(f"model {name}: unknown name; {_suggest_instead(builtin)}")
    return _BUILTIN[builtin] if found is None else _as_spec(name, found)


def _as_spec(name: str, found: object) -> AnySpec:
    if isinstance(found, ModelSpec | ModuleSpec):
        return found
    if isinstance(found, RegisteredModel):
        return spec_of(found.maker, summary=found.summary, input_shape=found.input_shape)
    if not callable(found):
        raise ConfigError(
            f"model {name}: is {type(found).__name__}; give an nn.Module, or a class or function that makes one"
        )
    return spec_of(found)


def canonical(name: str) -> str:
    """Return the name of a built-in model in its usual spelling; other names with dashes."""
    name = name.replace("_", "-")
    return _ALIASES.get(name, name)


def is_known(name: str) -> bool:
    """Check whether a model has this name."""
    return ":" in name or canonical(name) in _BUILTIN or name in names()


def resolve(name: str, options: ModelConfig) -> AnySpec:
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
    """Build a model without values; enough to describe it. Models of convolve cost neither time nor memory then."""
    return find(name).build_meta(_check_args(name, classes, input_shape, options))


def build(name: str, *, classes: int, input_shape: Shape, seed: int, options: ModelConfig) -> Network:
    """Build an initialized model on the CPU in float32; equal arguments give equal bits."""
    return find(name).build(_check_args(name, classes, input_shape, options), seed)


def _check_args(name: str, classes: int, input_shape: Shape, options: ModelConfig) -> BuildArgs:
    check(options.model_copy(update={"model": name}))
    if classes < 2:
        raise ConfigError(f"model {name} with {classes} classes: a classifier needs at least 2; check the data set")
    if min(input_shape) < 1:
        raise ConfigError(f"model {name} with input {input_shape}: channels, height and width must be at least 1")
    return BuildArgs(name, classes, input_shape, options)


def _suggest_instead(name: str) -> str:
    """List the family that the name belongs to, by size; else similar names."""
    family = family_of(name)
    if family is None:
        return f"{suggest(name, names())}; the name of a plugin needs --plugin FILE.py"
    members = [known for known in names() if family_of(known) is family]
    members.sort(key=lambda known: [int(size) for size in re.findall(r"\d+", known)])
    return f"known of its family are {', '.join(members)}"


def _family(name: str) -> str:
    family = family_of(name)
    return name if family is None else family.family
