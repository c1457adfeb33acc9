"""`convolve train`: a new run."""

from pathlib import Path

from convolve.app.console import Console, console_of
from convolve.app.costing import sketch_network
from convolve.app.layout import check_splits
from convolve.app.occupancy import occupy
from convolve.app.sameness import require_same_start
from convolve.app.training import Training, TrainReport
from convolve.config import Config
from convolve.models import registry
from convolve.parallel.team import open_team
from convolve.report.folder import claim_run_folder


def run(config: Config, console: Console) -> TrainReport:
    """Train a config from the beginning in a folder of its own."""
    registry.check(config.model)
    check_splits(sketch_network(config), config)
    with open_team(config.parallel) as team:
        require_same_start(team, config)
        console = console_of(team, console)
        folder = Path(team.tell(str(claim_run_folder(config.run, config.name)) if team.first else ""))
        with occupy(folder, team):
            training = Training(config, folder, console, team)
            training.write_config()
            return training.run()
