"""Initial weights from elsewhere: our checkpoints, and safetensors files of ours, torchvision's or timm's networks.

Every tensor must fit, by name and shape. The one exception is the classifier: where the number of classes differs, the
fresh one stays, which is what fine-tuning wants.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from convolve.checkpoint.snapshot import describe_foreign
from convolve.checkpoint.store import find, find_best, load
from convolve.errors import CheckpointError
from convolve.models.naming import to_own_names
from convolve.models.network import Network


@dataclass(frozen=True)
class Transfer:
    """What was taken over, and the parameters that kept their fresh values."""

    source: Path
    taken: int
    fresh: tuple[str, ...]


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of a checkpoint, or of a run's best or newest checkpoint."""
    if path.is_dir():
        paths = find(path)
        chosen = paths[0] if len(paths) == 1 else find_best(paths[-1].parent) or paths[-1]
        return load(chosen).tensors["model"]
    if not path.is_file():
        raise CheckpointError(f"init-path={path}: there is no such file or folder")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        with path.open("rb") as file:
            foreign = describe_foreign(file.read(8), path.suffix.lower())
        if foreign:
            raise CheckpointError(
                f"init-path={path}: is {foreign}, and pickles can run code; make it safe first with: "
                f"convolve convert {path} {path.with_suffix('.safetensors')}"
            ) from None
        reason = " ".join(str(error).split())
        raise CheckpointError(f"init-path={path}: is not safetensors ({reason}); give another file") from None


def transfer(network: Network, path: Path) -> Transfer:
    """Put weights from a path into a network."""
    own = network.state_dict()
    weights = to_own_names(read_weights(path), own)
    head = head_names(network)
    _require_fit(own, weights, head, path)
    taken = [name for name in own if name in weights and weights[name].numel() == own[name].numel()]
    with torch.no_grad():
        for name in taken:
            own[name].copy_(weights[name].reshape(own[name].shape))
    return Transfer(path, len(taken), tuple(name for name in own if name in head and name not in taken))


def head_names(network: Network) -> frozenset[str]:
    """Names of the parameters of the last block that has any: the classifier."""
    for name, block in reversed(network.blocks.items()):
        found = frozenset(f"{name.replace('/', '.')}.{key}" for key in block.state_dict())
        if found:
            return found
    return frozenset()


def _require_fit(own: dict[str, Tensor], weights: dict[str, Tensor], head: frozenset[str], path: Path) -> None:
    missing = [name for name in own if name not in weights and name not in head]
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    if missing:
        raise CheckpointError(
            f"init-path={path}: has no '{missing[0]}' ({len(missing)} of {len(own)} are missing); "
            "choose the --model that the file was made with"
        )
    surplus = sorted(set(weights) - set(own) - head)
    if surplus:
        raise CheckpointError(
            f"init-path={path}: has '{surplus[0]}', which the network has not ({len(surplus)} such); "
            "choose the --model that the file was made with"
        )
    for name, tensor in own.items():
        if name in weights and name not in head and tensor.numel() != weights[name].numel():
            raise CheckpointError(
                f"init-path={path}: '{name}' has shape {list(weights[name].shape)}, the network needs "
                f"{list(tensor.shape)}; only the classifier may differ"
            )
