"""Averages of checkpoints: a mean or an exponential one, computed in float64 and stored in each tensor's own format.

    mean           (c_1 + ... + c_n) / n
    exponential    a := c_1;  a := d a + (1 - d) c_i  for i = 2 ... n

An average is a checkpoint of its own, in `averages/<name>` of the run, without optimizer state. Norm statistics are
averaged here like all else, which is only roughly right for batch norm: whoever has data re-estimates them afterwards.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from convolve.checkpoint.manifest import encode_manifest, verify
from convolve.checkpoint.snapshot import Snapshot, encode
from convolve.errors import CheckpointError
from convolve.files import describe_write_error, recover, write_folder
from convolve.run_files import AVERAGES_FOLDER, MANIFEST_FILE

BlendFn = Callable[[Tensor, Tensor, int], Tensor]


def mean(average: Tensor, newest: Tensor, count: int) -> Tensor:
    """The mean of `count` tensors from the mean of all but the newest."""
    return average + (newest - average) / count


def exponential(decay: float) -> BlendFn:
    """The exponential average with a decay."""
    return lambda average, newest, count: decay * average + (1 - decay) * newest


def average_weights(snapshots: Iterable[Snapshot], blend: BlendFn) -> dict[str, Tensor]:
    """The averaged weights; one snapshot is in memory at a time. Counters are those of the newest."""
    sums: dict[str, Tensor] = {}
    newest: dict[str, Tensor] = {}
    for count, snapshot in enumerate(snapshots, start=1):
        newest = snapshot.tensors["model"]
        if count == 1:
            sums = {name: tensor.double() for name, tensor in newest.items() if tensor.is_floating_point()}
        if any(name not in newest or newest[name].shape != tensor.shape for name, tensor in sums.items()):
            raise CheckpointError(f"step {snapshot.step}: its weights differ in name or shape; average one run only")
        if count > 1:
            sums = {name: blend(tensor, newest[name].double(), count) for name, tensor in sums.items()}
    if not newest:
        raise CheckpointError("there is no checkpoint to average; discard fewer of them")
    return {name: sums[name].to(tensor.dtype) if name in sums else tensor for name, tensor in newest.items()}


def list_averages(run: Path) -> list[Path]:
    """The averages of a run, by name."""
    folder = run / AVERAGES_FOLDER
    return sorted(path.parent for path in folder.glob(f"*/{MANIFEST_FILE}")) if folder.is_dir() else []


def save_average(run: Path, name: str, snapshot: Snapshot) -> Path:
    """Store an average under a name, as a whole or not at all; one of the same name is replaced."""
    path = run / AVERAGES_FOLDER / name
    files = encode(snapshot)
    files[MANIFEST_FILE] = encode_manifest(files)
    try:
        recover(path.parent)
        write_folder(path, files)
    except OSError as error:
        raise CheckpointError(describe_write_error(path, error)) from error
    verify(path)
    return path


@torch.no_grad()
def replace_weights(snapshot: Snapshot, weights: dict[str, Tensor], facts: dict[str, object]) -> Snapshot:
    """A snapshot with other weights, no optimizer state, and a note of where the weights come from."""
    return Snapshot({"model": weights}, {**snapshot.state, **facts, "metrics": {}, "best": False})
