"""The curves of runs in a folder, read while they grow. Names from clients are looked up, never joined to a path."""

from pathlib import Path
from typing import Any

from convolve.errors import ConvolveError
from convolve.report.tables import Points, read_points
from convolve.report.writers import TRAINING_FILE, VALIDATION_FILE

MOST_POINTS = 400
MOST_RUNS = 200


def list_runs(parent: Path) -> dict[str, Path]:
    """Runs by name, those that were written to last first."""
    try:
        found = [path for path in parent.iterdir() if (path / TRAINING_FILE).is_file()]
    except OSError:
        return {}
    found.sort(key=lambda path: (path / TRAINING_FILE).stat().st_mtime, reverse=True)
    return {path.name: path for path in found[:MOST_RUNS]}


def read_run(folder: Path) -> dict[str, Any]:
    """Loss, accuracy, rate and speed of one run, in few enough points to draw."""
    training, validation = folder / TRAINING_FILE, folder / VALIDATION_FILE
    columns = {
        "loss": (training, "loss"),
        "accuracy": (training, "accuracy"),
        "validation_loss": (validation, "loss"),
        "validation_accuracy": (validation, "accuracy"),
        "learning_rate": (training, "learning_rate"),
        "images_per_second": (training, "images_per_second"),
    }
    curves: dict[str, Points] = {}
    for name, (path, column) in columns.items():
        try:
            points = read_points(path, column)
        except ConvolveError:
            points = []  # a line is being written at this moment
        curves[name] = points[:: max(1, -(-len(points) // MOST_POINTS))] + points[-1:]
    finished = (folder / "summary.json").is_file()
    return {"name": folder.name, "finished": finished, "curves": curves}
