"""What the user can say: the typed schema, named configs, and the checks that join fields. Imports no torch."""

from convolve.config.schema import Config, DataConfig, LogConfig, ModelConfig, RunConfig
from convolve.config.training import OptimConfig, ParallelConfig, PrecisionConfig, ScheduleConfig

__all__ = [
    "Config",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "ScheduleConfig",
]
