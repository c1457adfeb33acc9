"""The result of a run, and what its loggers write at the start."""

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from convolve.checkpoint.snapshot import Snapshot
from convolve.config import Config
from convolve.data.build import DataModule
from convolve.engine.build import Numerics
from convolve.engine.metrics import EvalResult
from convolve.engine.step import StepParts
from convolve.errors import CheckpointError
from convolve.label_scores import MEAN_AVERAGE_PRECISION, LabelScore
from convolve.loggers.base import RunInfo
from convolve.run_files import RECIPE_FILE


@dataclass(frozen=True)
class TrainReport:
    """Result of a run. `test_accuracy` is in [0, 1], or None if nothing was validated; `split` is what the data calls
    the images that it was computed on.

    `chance` is the accuracy without looking at the images, the fraction of the most frequent class; None unless a
    recipe chose the config. `labels` are the scores of each label on the test images, if images have several.
    """

    run_dir: Path
    test_accuracy: float | None
    test_samples: int
    images_per_second: float
    ms_per_step: float
    seconds: float
    steps: int
    final_loss: float | None
    dataset: str
    stopped_by: signal.Signals | str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    split: str = "test"
    stopped_early: str | None = None
    chance: float | None = None
    labels: tuple[LabelScore, ...] = ()

    @property
    def score(self) -> float | None:
        """What runs are compared by: the mean average precision if images have several labels, else the accuracy."""
        return self.metrics.get(MEAN_AVERAGE_PRECISION, self.test_accuracy)


def run_info(
    config: Config, folder: Path, *, data: DataModule, numerics: Numerics, parts: StepParts, parameters: int
) -> RunInfo:
    """Return what loggers write at the start of a run."""
    return RunInfo(
        name=folder.name,
        folder=folder,
        config=config.values(),
        facts={
            "model": config.model.model,
            "parameters": parameters,
            "dataset": data.dataset.name,
            "training_images": len(data.dataset.train),
            **{f"{name}_images": len(reader) for name, reader in data.dataset.splits.items() if name != "train"},
            "device": str(data.device),
            "threads": torch.get_num_threads(),
            "global_batch_size": config.global_batch_size,
            "numerics": str(numerics.choice),
            "native_layers": len(parts.native_layers),
        },
    )


def read_best(snapshot: Snapshot) -> EvalResult | None:
    """Return the best validation before a checkpoint; those of version 0.1 have only its accuracy."""
    stored, accuracy = snapshot.state.get("best_validation"), snapshot.number("best_accuracy", -1.0)
    try:
        if stored:
            return EvalResult.from_json(stored)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointError(f"state has best_validation={stored!r:.40}: not a validation") from None
    return EvalResult(-math.inf, accuracy, 0) if accuracy >= 0 else None


def reports_best(folder: Path, data: DataModule) -> bool:
    """Return whether the result of a run is that of its best checkpoint: with validation images, or by a recipe."""
    return data.dataset.validation is not None or chance_level(folder, data) is not None


def chance_level(folder: Path, data: DataModule) -> float | None:
    """Return the accuracy without looking at the images, if a recipe chose the config and images have one class."""
    if not (folder / RECIPE_FILE).exists() or data.dataset.task != "single-label":
        return None
    return float(np.bincount(data.dataset.test.labels).max() / len(data.dataset.test))
