"""Short trainings on the shipped digits, and what they left behind."""

import hashlib
from pathlib import Path

from convolve.config.loading import resolve


def digits_config(folder, **given):
    """A short training on the shipped digits in an exact folder."""
    small = {"dataset": "digits", "epochs": 1, "run_dir": folder, "threads": 1, "curves": False}
    return resolve(
        "lenet5-mnist", None, {"warmup_epochs": 0, "lr_schedule": "constant", "augment": "none", **small, **given}
    ).config


def weights_hash(run_dir: Path) -> str:
    """sha256 of the newest checkpoint's weights."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()
