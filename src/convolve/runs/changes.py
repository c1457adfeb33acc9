"""Options that may change when a run is resumed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from convolve.config import Config
from convolve.config.loading import build
from convolve.config.training import AUTO_SPLITS
from convolve.errors import ConfigError


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
        layout = build({**config.parallel.model_dump(), **splits, **self.parallel}).parallel
        micro_batches, replicas = config.optim.gradient_accumulation_count * config.parallel.replicas, layout.replicas
        if micro_batches % replicas:
            raise ConfigError(
                f"replicas={replicas}: a step of this run has {micro_batches} micro batches, which so many replicas "
                f"cannot share evenly; choose a divisor of {micro_batches}"
            )
        options["gradient_accumulation_count"] = micro_batches // replicas
        return config.replace(**options, **layout.model_dump())
