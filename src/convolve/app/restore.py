"""`convolve restore`: go on with a run exactly where it stopped."""

from pathlib import Path

from convolve.app.console import Console
from convolve.app.training import CONFIG_FILE, Training, TrainReport, extend
from convolve.config import Config
from convolve.config.loading import parse
from convolve.errors import CheckpointError
from convolve.report.tables import rewind


def read_config(folder: Path) -> Config:
    """The resolved config of a run."""
    try:
        return parse((folder / CONFIG_FILE).read_text(encoding="utf-8"), str(folder / CONFIG_FILE))
    except OSError:
        raise CheckpointError(
            f"{folder}: not a run folder ({CONFIG_FILE} is not there); give the folder that `convolve train` named"
        ) from None


def run(folder: Path, console: Console, *, epochs: float | None = None, iterations: int | None = None) -> TrainReport:
    """Restore the newest good checkpoint and train on; a longer `epochs` or `iterations` extends a finished run."""
    training = Training(extend(read_config(folder), epochs, iterations), folder, console)
    path = training.resume()
    console.say(f"restored {path.name}")
    rewind(folder, training.state.step)
    training.write_config()
    return training.run()
