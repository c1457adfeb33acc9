"""Options that may change when a run is resumed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from convolve.config import Config
from convolve.config.loading import build
from convolve.config.training import AUTO_SPLITS
from convolve.distributed.collectives import HOST_OPTIONS
from convolve.distributed.topology import started_replicas
from convolve.errors import ConfigError

# What may differ between the command of a run and the one that continues it, besides the layout.
_FREE = (*HOST_OPTIONS, "run_dir", "resume", "log_dir", "name_suffix")


@dataclass(frozen=True)
class Changes:
    """What may change when a run is resumed: its length, and its layout over processes."""

    epochs: float | None = None
    iterations: int | None = None
    parallel: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, config: Config) -> Config:
        """Return the config of the resumed run; the global batch stays the same."""
        options: dict[str, Any] = {}
        if self.epochs is not None or self.iterations is not None:
            options = {"epochs": self.epochs, "iterations": self.iterations}
        if not self.parallel:
            return config.replace(**options)
        splits = {"pipeline_splits": AUTO_SPLITS} if "shards" in self.parallel else {}
        given = self.parallel.get("micro_batches")
        if given not in (None, config.micro_batches):
            raise ConfigError(f"micro_batches={given}: a step of this run has {config.micro_batches}; omit it")
        layout = build({**config.parallel.model_dump(), "micro_batches": None, **splits, **self.parallel}).parallel
        micro_batches, replicas = config.micro_batches, layout.replicas
        if replicas > micro_batches:
            raise ConfigError(
                f"replicas={replicas}: a step of this run has {micro_batches} micro batches; use at most so many"
            )
        options["gradient_accumulation_count"] = -(-micro_batches // replicas)
        even = micro_batches % replicas == 0
        return config.replace(**options, **{**layout.model_dump(), "micro_batches": None if even else micro_batches})


def fit_processes(config: Config) -> Config:
    """Return the config with as many replicas as processes were started for, and the same global batch."""
    replicas = started_replicas(config.parallel)
    return config if replicas == config.parallel.replicas else Changes(parallel={"replicas": replicas}).apply(config)


def continue_config(stored: Config, given: Config) -> Config:
    """Return the config with which a run continues: the stored one in the layout and on the devices of the given one.

    Raises ConfigError if other options differ, since they would have no effect.
    """
    parallel = given.parallel.model_dump(exclude={"micro_batches"})
    free = {name: value for name, value in given.values().items() if name in _FREE}
    config = Changes(parallel=parallel).apply(stored).replace(**free)
    now = given.replace(dataset=config.data.dataset).values()
    for name, value in config.values().items():
        if value != now[name]:
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} {now[name]}: the run in {given.run.run_dir} has {value}; use its options or another folder"
            )
    return config
