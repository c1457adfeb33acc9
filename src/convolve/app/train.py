"""`convolve train`: a new run."""

from convolve.app.console import Console
from convolve.app.training import Training, TrainReport
from convolve.config import Config
from convolve.report.folder import claim_run_folder


def run(config: Config, console: Console) -> TrainReport:
    """Train a config from the beginning in a folder of its own."""
    folder = claim_run_folder(config.run, config.name)
    training = Training(config, folder, console)
    training.write_config()
    return training.run()
