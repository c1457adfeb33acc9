"""Short trainings on the shipped digits, and what they left behind."""

import hashlib
import os
from pathlib import Path

from safetensors.torch import save

from convolve.checkpoint.store import load
from convolve.config.loading import resolve
from convolve.loggers.base import SilentConsole


def digits_config(folder, **given):
    """Return the config of a short run on the bundled digits in an exact folder."""
    small = {"dataset": "digits", "epochs": 1, "run_dir": folder, "threads": 1, "curves": False}
    return resolve(
        "lenet5-mnist", None, {"warmup_epochs": 0, "lr_schedule": "constant", "augment": "none", **small, **given}
    ).config


def weights_hash(run_dir: Path) -> str:
    """Return the sha256 of the weights of the newest checkpoint, as one file if several processes wrote them."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    if (newest / "model.safetensors").exists():
        return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()
    return hashlib.sha256(save(load(newest).tensors["model"])).hexdigest()


def state_hash(run_dir: Path) -> str:
    """Return the sha256 of all tensors of the newest checkpoint: weights, statistics, optimizer state and averages."""
    parts = load(max((run_dir / "checkpoints").glob("step-*"))).tensors
    named = {f"{part}.{name}": tensor.contiguous() for part, held in parts.items() for name, tensor in held.items()}
    return hashlib.sha256(save(named)).hexdigest()


class StoppingConsole(SilentConsole):
    """Sends this process a signal after a number of samples, as a user or a scheduler would."""

    def __init__(self, after, number):
        self.after, self.number = after, number

    def progress(self, what, done, total):
        if self.after is not None and done >= self.after:
            self.after = None
            os.kill(os.getpid(), self.number)
