"""Averages of checkpoints, computed in float64 and stored in the dtype of each tensor.

    mean           (c_1 + ... + c_n) / n
    exponential    a := c_1;  a := d a + (1 - d) c_i  for i = 2 ... n

An average is saved as a checkpoint in `averages/<name>` of the run, without optimizer state. Batch-norm statistics are
averaged like everything else, which is only approximate; `runs/average.py` re-estimates them from data.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from convolve.checkpoint.manifest import compare_written, encode_manifest
from convolve.checkpoint.snapshot import Snapshot, encode
from convolve.errors import CheckpointError
from convolve.files import describe_write_error, recover, write_folder
from convolve.run_files import AVERAGES_FOLDER, MANIFEST_FILE

BlendFn = Callable[[Tensor, Tensor, int], Tensor]


def mean(average: Tensor, newest: Tensor, count: int) -> Tensor:
    """Return the mean of `count` tensors, given the mean of all but the newest."""
    return average + (newest - average) / count


def exponential(decay: float) -> BlendFn:
    """Return the blend function of an exponential average."""
    return lambda average, newest, count: decay * average + (1 - decay) * newest


def average_weights(snapshots: Iterable[Snapshot], blend: BlendFn) -> dict[str, Tensor]:
    """Average weights with one snapshot in memory at a time; integer tensors are those of the newest."""
    sums: dict[str, Tensor] = {}
    newest: dict[str, Tensor] = {}
    for count, snapshot in enumerate(snapshots, start=1):
        newest = snapshot.tensors["model"]
        if count == 1:
            sums = {name: tensor.double() for name, tensor in newest.items() if tensor.is_floating_point()}
        if any(name not in newest or newest[name].shape != tensor.shape for name, tensor in sums.items()):
            raise CheckpointError(f"step {snapshot.step}: weights differ in name or shape; average one run only")
        if count > 1:
            sums = {name: blend(tensor, newest[name].double(), count) for name, tensor in sums.items()}
    if not newest:
        raise CheckpointError("average: no checkpoint is left to average; discard fewer")
    return {name: sums[name].to(tensor.dtype) if name in sums else tensor for name, tensor in newest.items()}


def list_averages(run: Path) -> list[Path]:
    """Return the averages of a run in order of their names."""
    folder = run / AVERAGES_FOLDER
    found = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_FILE}")) if folder.is_dir() else []
    linked = [path for path in (folder, *found) if path.is_symlink()]
    if linked:
        raise CheckpointError(f"{linked[0]}: is a symbolic link; replace it with the folder it points to, or remove it")
    return found


def save_average(run: Path, name: str, snapshot: Snapshot) -> Path:
    """Save an average atomically under a name; an average of the same name is replaced."""
    path = run / AVERAGES_FOLDER / name
    files = encode(snapshot)
    files[MANIFEST_FILE] = encode_manifest(files)
    try:
        recover(path.parent)
        write_folder(path, files)
    except OSError as error:
        raise CheckpointError(describe_write_error(path, error)) from error
    compare_written(path, files)
    return path


@torch.no_grad()
def replace_weights(snapshot: Snapshot, weights: dict[str, Tensor], origin: dict[str, object]) -> Snapshot:
    """Return a snapshot with other weights, without optimizer state; `origin` documents the weights in its state."""
    return Snapshot({"model": weights}, {**snapshot.state, **origin, "metrics": {}, "best": False})
