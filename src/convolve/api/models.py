"""`convolve.models`: list, create and describe models by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from convolve.api.session import session
from convolve.config.model_options import family_of
from convolve.errors import ConfigError, suggest
from convolve.models import registry
from convolve.models.network import Network

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from convolve.config.options import ModelOptions
    from convolve.models.summary import ModelSummary


AnyT = TypeVar("AnyT")


@dataclass(frozen=True)
class ModelInfo:
    """One model in the list. `weights` are the names of published weights for `convolve.models.create`."""

    name: str
    summary: str
    family: str | None
    input_shape: tuple[int, ...]
    classes: int
    weights: tuple[str, ...] = ()


def list(pattern: str = "*", *, family: str | None = None, weights: bool = False) -> tuple[ModelInfo, ...]:
    """Return the models whose name matches a pattern such as `resne*t*`, sorted by name.

    Args:
        family: only models of this family, such as resnet.
        weights: only models with published weights.
    """
    found = [_describe(name) for name in registry.names() if fnmatch(name, pattern)]
    families = {info.family for info in map(_describe, registry.names()) if info.family}
    if family is not None and family not in families:
        raise ConfigError(f"family {family}: unknown; {suggest(family, families)}")
    return tuple(info for info in found if (family is None or info.family == family) and (info.weights or not weights))


def _describe(name: str) -> ModelInfo:
    from convolve.checkpoint.weights_table import WEIGHTS

    spec, family = registry.find(name), family_of(name)
    published = tuple(key for key, info in WEIGHTS.items() if info.model == name)
    kind = None if family is None else family.family
    return ModelInfo(name, spec.summary, kind, spec.input_shape, spec.classes, published)


def create(
    name: str,
    *,
    classes: int | None = None,
    input_shape: Sequence[int] | None = None,
    seed: int = 0,
    **options: Unpack[ModelOptions],
) -> Network:
    """Return an initialized model on the CPU in float32; equal arguments give equal bits.

    Args:
        classes: outputs; by default those of the model's usual data set.
        input_shape: channels, height and width; by default the usual ones of the model.
        options: those of the model, and `weights`: a name of published weights, or the path of a safetensors file or
            checkpoint. A head for other classes stays new.
    """
    with session():
        from convolve.checkpoint.pretrained import adopt_weights, find_weights, load_pretrained
        from convolve.config.loading import build
        from convolve.loggers.base import SilentConsole

        config = adopt_weights(build({**options, "model": name}), SilentConsole())
        registry.check(config.model)
        spec = registry.resolve(name, config.model)
        model = registry.build(
            name,
            classes=classes or spec.classes,
            input_shape=tuple(input_shape or spec.input_shape),
            seed=seed,
            options=config.model,
        )
        file = find_weights(config, SilentConsole())
        if file is not None:
            load_pretrained(model, file.path)
        return model


def describe(what: str, *, graph: str | Path | None = None) -> ModelSummary:
    """Return the layers of a model, a named config or a run folder, with shapes, parameters and multiply-adds.

    Args:
        graph: SVG file for a drawing of the model.
    """
    with session():
        from convolve.runs.describe import describe_model, write_svg

        summary = describe_model(what)
        if graph is not None:
            write_svg(summary, Path(graph))
        return summary
