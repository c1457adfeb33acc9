"""`convolve restore`: go on with a run exactly where it stopped."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convolve.app.console import Console, console_of
from convolve.app.length import extend
from convolve.app.occupancy import occupy
from convolve.app.sameness import require_same_start
from convolve.app.training import CONFIG_FILE, Training, TrainReport
from convolve.config import Config
from convolve.config.loading import build, parse
from convolve.config.schema import AUTO_SPLITS
from convolve.errors import CheckpointError, ConfigError
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


@dataclass(frozen=True)
class Changes:
    """What may differ when a run goes on: its length, and how it is laid out over processes."""

    epochs: float | None = None
    iterations: int | None = None
    parallel: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, config: Config) -> Config:
        """The config of the run from now on; the global batch stays what it was."""
        changed = extend(config, self.epochs, self.iterations)
        if not self.parallel:
            return changed
        splits = {"pipeline_splits": AUTO_SPLITS} if "shards" in self.parallel else {}
        layout = build({**config.parallel.model_dump(), **splits, **self.parallel}).parallel
        micro_batches, replicas = config.optim.gradient_accumulation_count * config.parallel.replicas, layout.replicas
        if micro_batches % replicas:
            raise ConfigError(
                f"replicas={replicas}: a step of this run has {micro_batches} micro batches, which so many replicas "
                f"cannot share evenly; choose a divisor of {micro_batches}"
            )
        accumulation = {"gradient_accumulation_count": micro_batches // replicas}
        return build({**changed.values(), **layout.model_dump(), **accumulation}, name=config.name)


def run(folder: Path, console: Console, changes: Changes | None = None) -> TrainReport:
    """Restore the newest good checkpoint and train on, with changes of length or layout."""
    config = (changes or Changes()).apply(read_config(folder))
    with open_team(config.parallel) as team:
        require_same_start(team, config)
        with occupy(folder, team):
            return _go_on(Training(config, folder, console_of(team, console), team))


def _go_on(training: Training) -> TrainReport:
    path = training.resume()
    training.console.say(f"restored {path.name}")
    if training.team.first:
        rewind(training.folder, training.state.step)
    training.write_config()
    return training.run()
