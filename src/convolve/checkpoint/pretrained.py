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
    FetchOptions,
    WeightsFile,
    default_weights,
    fetch_weights,
    is_weights_name,
    unknown_weights,
)
from convolve.checkpoint.naming import convert_state_dict
from convolve.checkpoint.snapshot import describe_mismatch
from convolve.checkpoint.store import choose_checkpoint, load
from convolve.config import Config
from convolve.config.model_options import family_of
from convolve.errors import CheckpointError, ConfigError
from convolve.loggers.base import Console
from convolve.models.network import Network


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
    name = default_weights(config.model.model) if given == "imagenet" else given
    if is_weights_name(name):
        options = FetchOptions(config.model.weights_dir, config.data.download)
        return fetch_weights(name, console.progress, options)
    path = Path(name)
    if path.suffix or path.exists() or len(path.parts) > 1:
        return WeightsFile(name, path)
    raise unknown_weights(name)


def adopt_weights(config: Config, console: Console) -> Config:
    """Return the config with the model options and preprocessing of its weights; explicit options have priority."""
    weights = find_weights(config, console)
    if weights is None:
        return config
    _require_model(config, weights)
    if weights.license:
        console.info(f"weights {weights.name}: {weights.source}; license {weights.license}")
    needed = _needed_options(config, weights)
    values = config.values()
    adopted = {name: value for name, value in needed.items() if values[name] is None}
    for name, value in needed.items():
        if values[name] not in (None, value):
            flag = name.replace("_", "-")
            console.info(f"warning: --{flag} {values[name]}, but these weights were trained with {value}")
    if adopted:
        settings = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in adopted.items())
        console.info(f"settings of the weights ({weights.origin}): {settings}")
    return config.replace(weights=weights.name, **adopted)


def _require_model(config: Config, weights: WeightsFile) -> None:
    model = config.model.model.replace("_", "-")
    if weights.model is not None and weights.model != model and config.model.model_size is None:
        raise ConfigError(
            f"--weights {weights.name}: weights of {weights.model}, not of {config.model.model}; "
            f"add --model {weights.model}"
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
