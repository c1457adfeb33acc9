"""Options of a run: typed schema, named configs and rules across options. Does not import torch."""

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
