"""`convolve restore`: go on with a run exactly where it stopped."""

from pathlib import Path

from convolve.app.console import Console, console_of
from convolve.app.training import CONFIG_FILE, Training, TrainReport, extend
from convolve.config import Config
from convolve.config.loading import parse
from convolve.errors import CheckpointError
from convolve.parallel.team import open_team
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
    config = extend(read_config(folder), epochs, iterations)
    with open_team(config.parallel) as team:
        console = console_of(team, console)
        training = Training(config, folder, console, team)
        path = training.resume()
        console.say(f"restored {path.name}")
        if team.first:
            rewind(folder, training.state.step)
        training.write_config()
        return training.run()
