"""Train convolutional image classifiers: any device, any number format, any layout, always the same result.

    import convolve

    run = convolve.train("mnist", "lenet5")
    print(run.load().predict("digit.png").label)

Every name is loaded on first use, so the import itself is fast and imports neither torch nor numpy. Type checkers and
editors read `__init__.pyi`.
"""

from convolve import lazy

__version__ = "0.1.0"

__all__ = [
    "__version__",
    *lazy.install(
        __name__,
        {
            "convolve.api.callbacks": ("Callback",),
            "convolve.api.checkpoints": ("Checkpoints", "Position"),
            "convolve.api.classifier": ("Classifier", "Prediction", "load"),
            "convolve.api.configs": ("config_schema", "config_values", "configs", "trace_schedule"),
            "convolve.api.ray": ("ray_trainer",),
            "convolve.api.records": ("Checkpoint",),
            "convolve.api.run": ("Run", "Stopped", "open", "report", "runs"),
            "convolve.api.search": ("LRCurve", "find_lr"),
            "convolve.api.sweep": ("SweepResult", "sweep"),
            "convolve.api.tools": ("align", "cache", "convert", "doctor", "plan", "predict", "serve", "validate"),
            "convolve.api.training": ("cross_validate", "prepare", "train"),
            "convolve.config.schema": ("Config",),
            "convolve.engine.objective": ("Loss", "Metric"),
            "convolve.errors": (
                "CheckpointError",
                "ConfigError",
                "ConvolveError",
                "CorruptionError",
                "DataError",
                "DeviceError",
                "DivergedError",
                "ExtraError",
                "GuaranteeError",
                "GuaranteeWarning",
                "NumericsError",
                "ParallelError",
            ),
            "convolve.loggers.base": ("Outputs", "TrainRecord", "ValidationRecord"),
        },
        submodules=("augmentations", "callbacks", "data", "losses", "metrics", "models", "optimizers"),
    ),
]
