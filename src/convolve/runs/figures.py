"""Figures of a run for its summary."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from convolve.engine.throughput import Timer
from convolve.runs.results import TrainReport
from convolve.runs.summary import case_name

if TYPE_CHECKING:
    from convolve.runs.session import Session


def summary_figures(session: "Session", report: TrainReport, timer: Timer) -> dict[str, Any]:
    """Return what summary.json contains; null if this process did not measure it."""
    config, measured = session.config, timer.measured
    return {
        "network": config.model.model,
        "dataset": report.dataset,
        "batch_size": config.optim.batch_size,
        "global_batch_size": config.global_batch_size,
        "device_type": session.data.device.type,
        "case_name": case_name(config.model.model, config.optim.batch_size, config.parallel.replicas, "acc"),
        "images_per_second": measured.images_per_second if measured else None,
        "ms_per_step": measured.ms_per_step if measured else None,
        "first_excluded": timer.first_excluded,
        "data_wait_included": True,
        "data_wait_share": measured.data_wait_share if measured else None,
        "test_accuracy": report.test_accuracy,
        "test_samples": report.test_samples,
        "test_split": report.split,
        "final_loss": report.final_loss,
        "steps": report.steps,
        "precision": session.numerics.choice.policy.name,
        "numerics": session.numerics.to_json(),
        "skipped_steps": session.state.scaler.skipped,
        "end_to_end_seconds": report.seconds,
        "metrics": dict(report.metrics),
        **({"labels": [asdict(score) for score in report.labels]} if report.labels else {}),
        **({"weights": session.weights} if session.weights else {}),
        "lost_guarantees": [lost.to_json() for lost in session.lost_guarantees],
    }
