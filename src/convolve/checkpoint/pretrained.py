"""Initial weights of a run: find them, take over the settings that they need, and load them into a model.

Every tensor must match by name and shape. The exception is the classifier: if the number of classes differs, it stays
newly initialized, as fine-tuning requires. Nothing is transposed or reshaped: a tensor with the right number of
elements in another order would load as noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from convolve.checkpoint.fetch import (
    WeightsFile,
    convert_file,
    default_weights,
    fetch_weights,
    read_shapes,
    unknown_weights,
)
from convolve.checkpoint.naming import convert_state_dict
from convolve.checkpoint.origin import recognize
from convolve.checkpoint.provenance import read_provenance
from convolve.checkpoint.snapshot import describe_mismatch
from convolve.checkpoint.sources import FetchOptions
from convolve.checkpoint.store import choose_checkpoint, load
from convolve.checkpoint.weights_table import find_info
from convolve.config import Config, ModelConfig
from convolve.config.model_options import family_of
from convolve.errors import CheckpointError, ConfigError
from convolve.files import file_sha256
from convolve.loggers.base import Console
from convolve.loggers.run_lines import join_lines
from convolve.models import registry
from convolve.models.network import Network

DEFAULT_SIDE = 224


@dataclass(frozen=True)
class LoadReport:
    """Number of loaded tensors, and the names of those that stay newly initialized."""

    source: Path
    loaded: int
    new: tuple[str, ...]


def find_weights(config: Config, console: Console) -> WeightsFile | None:
    """Return the initial weights of a config, downloaded if necessary; None for random ones."""
    given = config.model.weights
    if given is None:
        return None
    name = default_weights(_resolve_model(config.model)[0]) if given == "imagenet" else given
    if find_info(name) is not None:
        options = FetchOptions(config.model.weights_dir, config.model.weights_mirror, config.data.download)
        return fetch_weights(name, console.progress, options)
    path = Path(name)
    if path.is_dir():
        return _describe_checkpoint(name, path)
    if path.suffix or path.exists() or len(path.parts) > 1:
        return _describe_file(name, path, config, console)
    raise unknown_weights(name)


def _describe_checkpoint(name: str, path: Path) -> WeightsFile:
    """Return the weights of a run, with the license of those that it started from."""
    stored = read_provenance(load(choose_checkpoint(path)).state.get("weights")) or {}
    return WeightsFile(name, path, source=stored.get("source"), license=stored.get("license"))


def _describe_file(name: str, path: Path, config: Config, console: Console) -> WeightsFile:
    if not path.is_file():
        raise CheckpointError(f"--weights {path}: no such file or folder; give a safetensors file or a run")
    converted = convert_file(path, console.progress)
    model, side = _resolve_model(config.model)
    origin = recognize(path, read_shapes(converted), model, side)
    return WeightsFile(
        name=name,
        path=converted,
        origin=origin.library,
        source=str(path),
        license=origin.license,
        sha256=file_sha256(converted),
        model_options=origin.model_options,
        preprocessing=origin.preprocessing,
    )


def _resolve_model(options: ModelConfig) -> tuple[str, int]:
    """Return the name of the model, of a family the selected member, and the image side that it was made for."""
    if ":" in options.model or not registry.is_known(options.model):
        return options.model, DEFAULT_SIDE  # a module of another package, which is not imported here
    spec = registry.find(options.model)
    member = spec.resolve(options) if spec.resolve else None
    name = registry.canonical(member or options.model)
    return name, registry.find(name).input_shape[1]


def adopt_weights(config: Config, console: Console) -> Config:
    """Return the config with the model options and preprocessing of its weights; explicit options have priority."""
    weights = find_weights(config, console)
    if weights is None:
        return config
    _require_model(config, weights)
    if weights.license:
        console.info(join_lines(f"weights {weights.name}: license {weights.license}", f"source: {weights.source}"))
    needed = _needed_options(config, weights)
    values = config.values()
    adopted = {name: value for name, value in needed.items() if values[name] is None}
    for name, value in needed.items():
        if values[name] not in (None, value):
            flag = name.replace("_", "-")
            console.info(f"warning: --{flag} {values[name]}, but these weights were trained with {value}")
    if adopted:
        settings = ", ".join(f"{name.replace('_', '-')} {_format(value)}" for name, value in adopted.items())
        console.info(f"settings of the weights ({weights.origin}): {settings}")
    return config.replace(weights=weights.name, **adopted)


def _format(value: Any) -> str:
    return "off" if value is False else f"{value:.4g}" if isinstance(value, float) else str(value)


def _require_model(config: Config, weights: WeightsFile) -> None:
    model, _ = _resolve_model(config.model)
    if weights.model not in (None, model) and config.model.model_size is None and ":" not in model:
        raise ConfigError(
            f"--weights {weights.name}: weights of {weights.model}, not of {model}; add --model {weights.model}"
        )


def _needed_options(config: Config, weights: WeightsFile) -> dict[str, Any]:
    family = family_of(config.model.model)
    offered = family.names() if family else ()
    needed = {name: value for name, value in weights.model_options.items() if name in offered}
    if (preprocessing := weights.preprocessing) is not None:
        needed |= {
            "normalization": preprocessing.normalization,
            "image_size": preprocessing.image_size,
            "crop_fraction": preprocessing.crop_fraction,
        }
    return needed


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, a checkpoint, or the best or newest checkpoint of a run."""
    if path.is_dir():
        return load(choose_checkpoint(path)).trained().tensors["model"]
    if not path.is_file():
        raise CheckpointError(f"--weights {path}: no such file or folder; give a safetensors file or a run")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        with path.open("rb") as file:
            mismatch = describe_mismatch(file.read(8), path.suffix.lower())
        if mismatch:
            raise CheckpointError(
                f"--weights {path}: is {mismatch}, and pickles can run code; convert it first: "
                f"convolve convert {path} {path.with_suffix('.safetensors')}"
            ) from None
        reason = " ".join(str(error).split())
        raise CheckpointError(f"--weights {path}: not a safetensors file ({reason}); give another file") from None


def load_pretrained(model: Network, path: Path) -> LoadReport:
    """Load weights from a path into a model."""
    expected = model.state_dict()
    weights = convert_state_dict(read_weights(path), expected)
    head = model.head()
    _require_names(expected, weights, head, path)
    new = frozenset(head if _has_other_classes(expected, weights, head) else ())
    _require_shapes(expected, weights, new, path)
    loaded = [name for name in expected if name in weights and name not in new]
    with torch.no_grad():
        for name in loaded:
            expected[name].copy_(weights[name])
    return LoadReport(path, len(loaded), tuple(name for name in expected if name in new))


def _has_other_classes(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], head: frozenset[str]) -> bool:
    """Return True if the classifier is missing, or has the same inputs but another number of outputs."""
    pairs = [(weights[name].shape, expected[name].shape) for name in head if name in weights]
    same_inputs = all(found[1:] == needed[1:] for found, needed in pairs)
    return len(pairs) < len(head) or (same_inputs and any(found != needed for found, needed in pairs))


def _require_names(
    expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], head: frozenset[str], path: Path
) -> None:
    missing = [name for name in expected if name not in weights and name not in head]
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    unexpected = [name for name in weights if name not in expected and name not in head]
    unexpected.sort(key=lambda name: name.endswith("num_batches_tracked"))
    if not missing and not unexpected:
        return
    problems = []
    if missing:
        problems.append(f"the model has {_list(missing)}, which the file lacks")
    if unexpected:
        problems.append(f"the file has {_list(unexpected)}, which the model lacks")
    raise CheckpointError(f"--weights {path}: {'; '.join(problems)}; choose the --model that the file was made with")


def _list(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _require_shapes(
    expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], new: frozenset[str], path: Path
) -> None:
    for name, tensor in expected.items():
        if name in new or name not in weights or weights[name].shape == tensor.shape:
            continue
        found, needed = weights[name], tensor
        order = _find_permutation(tuple(found.shape), tuple(needed.shape))
        remedy = "only the number of classes may differ; choose the --model that the file was made with"
        if order is not None:
            remedy = f"it would fit after permute({', '.join(map(str, order))}), as in files of TensorFlow; convert it"
        raise CheckpointError(
            f"--weights {path}: '{name}' has shape {list(found.shape)}, the model needs {list(needed.shape)}; {remedy}"
        )


def _find_permutation(found: tuple[int, ...], needed: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return an order of axes that turns one shape into the other; TensorFlow's order of kernels is tried first."""
    if sorted(found) != sorted(needed) or len(found) > 5:
        return None
    orders: list[tuple[int, ...]] = [(3, 2, 0, 1)] if len(found) == 4 else []
    orders += permutations(range(len(found)))
    return next((order for order in orders if tuple(found[axis] for axis in order) == needed), None)
