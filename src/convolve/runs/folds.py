"""Cross-validation: one run for each fold, and the mean of their accuracies."""

import math
from dataclasses import dataclass
from pathlib import Path

from convolve.config import Config
from convolve.loggers.base import Console
from convolve.runs.results import TrainReport
from convolve.runs.session import train


@dataclass(frozen=True)
class FoldsReport:
    """Results of a cross-validation; `mean` and `deviation` of the accuracy, or of the mean average precision if images
    have several labels, are over folds, None if nothing was validated.

    `runs` has the report of every run that was started; the last one may have been interrupted.
    """

    folds: int
    runs: list[TrainReport]
    mean: float | None
    deviation: float | None


def train_folds(config: Config, console: Console) -> FoldsReport:
    """Train once with each fold held out, in run folders that end with the number of the fold; a signal ends it."""
    folds = config.data.folds
    assert folds is not None, "the config has no folds"
    runs: list[TrainReport] = []
    for fold in range(folds):
        console.info(f"fold {fold} of {folds}")
        runs.append(train(_config_of(config, fold), console))
        if runs[-1].stopped_by is not None:
            break
    return summarize_folds(folds, runs)


def summarize_folds(folds: int, runs: list[TrainReport]) -> FoldsReport:
    """Return the mean score over the runs, and the standard deviation between folds."""
    found = [run.score for run in runs if run.score is not None]
    if not found:
        return FoldsReport(folds, runs, None, None)
    mean = sum(found) / len(found)
    spread = sum((score - mean) ** 2 for score in found)
    return FoldsReport(folds, runs, mean, math.sqrt(spread / max(len(found) - 1, 1)))


def _config_of(config: Config, fold: int) -> Config:
    suffix = "-".join(filter(None, (config.run.name_suffix, f"fold-{fold}")))
    folder = None if config.run.run_dir is None else Path(config.run.run_dir) / f"fold-{fold}"
    return config.replace(fold=fold, run_dir=folder, name_suffix=suffix)
