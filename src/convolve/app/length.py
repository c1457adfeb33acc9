"""How long a run is. A step never crosses the end of an epoch, so steps translate into samples exactly."""

from convolve.config import Config

DEFAULT_EPOCHS = 5.0


def plan_samples(config: Config, samples_per_epoch: int) -> int:
    """The whole run in samples."""
    if config.optim.iterations is None:
        return max(1, round((config.optim.epochs or DEFAULT_EPOCHS) * samples_per_epoch))
    return samples_after(config.optim.iterations, config, samples_per_epoch)


def samples_after(steps: int, config: Config, samples_per_epoch: int) -> int:
    """The position after so many steps from the beginning."""
    steps_per_epoch = -(-samples_per_epoch // config.global_batch_size)
    epochs, rest = divmod(steps, steps_per_epoch)
    return epochs * samples_per_epoch + rest * config.global_batch_size


def extend(config: Config, epochs: float | None, iterations: int | None) -> Config:
    """The config of a run that goes on for longer."""
    if epochs is None and iterations is None:
        return config
    return config.model_copy(
        update={"optim": config.optim.model_copy(update={"epochs": epochs, "iterations": iterations})}
    )
