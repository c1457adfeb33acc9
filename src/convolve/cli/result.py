"""The closing words of a training."""

from convolve.app.training import TrainReport
from convolve.parallel.topology import speaks


def finish(report: TrainReport) -> int:
    """Say what came out, and give the exit code: 0, or 128 + signal number for a run that was stopped."""
    if not speaks():
        return 0 if report.stopped_by is None else 128 + int(report.stopped_by)
    if report.stopped_by is not None:
        print(
            f"stopped by {report.stopped_by.name} at step {report.steps}; go on with: convolve restore {report.run_dir}"
        )
        return 128 + int(report.stopped_by)
    if report.test_accuracy is not None:
        print(f"test accuracy {report.test_accuracy:.2%} on {report.test_samples:,} images of {report.dataset}")
    print(
        f"{report.images_per_second:,.0f} images/s, {report.ms_per_step:.2f} ms/step, {report.seconds:.1f} s in all; "
        f"run folder {report.run_dir}"
    )
    return 0
