"""Runs that are complete: restoring one changes nothing."""

import json
from pathlib import Path

from convolve.checkpoint.store import Store, load_state
from convolve.config import Config
from convolve.engine.loop import run_samples
from convolve.errors import CheckpointError
from convolve.files import read_run_file
from convolve.run_files import CHECKPOINTS_FOLDER, REPORT_FILE, SUMMARY_FILE, step_of
from convolve.runs.results import TrainReport


def read_finished(folder: Path, config: Config) -> TrainReport | None:
    """Return the result of a run that is complete and has all its files; None if there is anything left to do.

    `config` has the requested length. A run that was killed between its last checkpoint and its report is not finished.
    """
    paths = Store(folder / CHECKPOINTS_FOLDER, keep=None).paths()
    if not paths or not config.log.logs or (config.log.report and not (folder / REPORT_FILE).is_file()):
        return None
    try:
        summary = json.loads(read_run_file(folder / SUMMARY_FILE))
        validated = config.run.validation_mode == "none" or summary["test_accuracy"] is not None
        if not validated or summary["steps"] != step_of(paths[-1]):
            return None  # without reading a checkpoint, which a resumed run reads anyway
        state = load_state(paths[-1])
        return _to_report(folder, summary, state.get("stopped_early")) if _is_complete(state, config) else None
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _is_complete(state: dict[str, object], config: Config) -> bool:
    if state.get("stopped_early"):
        return True
    samples, epoch = state["samples"], state["samples_per_epoch"]
    if not isinstance(samples, int) or not isinstance(epoch, int) or epoch < 1:
        return False  # restoring it says what is wrong
    return samples >= run_samples(config, epoch)


def _to_report(folder: Path, summary: dict[str, object], stopped_early: object) -> TrainReport:
    """Return the result that a summary describes; raise if it has no figures, as after an interruption."""
    numbers = {key: summary.get(key) for key in ("test_accuracy", "final_loss", "images_per_second", "ms_per_step")}
    figures = {key: None if value is None else float(str(value)) for key, value in numbers.items()}
    metrics = summary.get("metrics")
    return TrainReport(
        run_dir=folder,
        test_accuracy=figures["test_accuracy"],
        test_samples=int(str(summary["test_samples"])),
        images_per_second=figures["images_per_second"] or 0.0,
        ms_per_step=figures["ms_per_step"] or 0.0,
        seconds=float(str(summary["end_to_end_seconds"])),
        steps=int(str(summary["steps"])),
        final_loss=figures["final_loss"],
        dataset=str(summary["dataset"]),
        split=str(summary.get("test_split", "test")),
        metrics=metrics if isinstance(metrics, dict) else {},
        stopped_early=stopped_early if isinstance(stopped_early, str) else None,
    )
