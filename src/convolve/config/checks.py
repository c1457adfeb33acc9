"""Rules that join several knobs. Each says what was given, which rule it breaks, and what to set."""

from convolve.config.schema import Config
from convolve.errors import ConfigError


def check(config: Config) -> None:
    """Raise on the first rule that a config breaks."""
    for rule in (_one_kind_of_made_up_data, _drops_inside_the_run, _warmup_inside_the_run, _momentum_for_nesterov):
        rule(config)


def _one_kind_of_made_up_data(config: Config) -> None:
    if config.data.generated_data and config.data.synthetic_data:
        raise ConfigError(
            "generated-data and synthetic-data are both on; generated data come from the host, "
            "synthetic ones live on the device: choose one"
        )


def _drops_inside_the_run(config: Config) -> None:
    drops = config.schedule.learning_rate_schedule
    if any(not 0 < share < 1 for share in drops) or list(drops) != sorted(drops):
        raise ConfigError(
            f"learning-rate-schedule={list(drops)}: drops are rising shares of the run between 0 and 1, "
            "for example 0.5 0.75"
        )


def _warmup_inside_the_run(config: Config) -> None:
    epochs, warmup = config.optim.epochs, config.schedule.warmup_epochs
    if epochs is not None and warmup >= epochs:
        raise ConfigError(f"warmup-epochs={warmup:g} with epochs={epochs:g}: the warm-up must end before the run does")


def _momentum_for_nesterov(config: Config) -> None:
    if config.optim.nesterov and config.optim.optimiser != "momentum":
        raise ConfigError(
            f"nesterov with optimiser={config.optim.optimiser}: it is a form of momentum; set --optimiser momentum"
        )
