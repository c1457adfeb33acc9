"""Which part of a network is trained: all of it, what comes after a named block, or parameters chosen by name."""

from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError, suggest
from convolve.models.network import Network


def limit_training(network: Network, options: ModelConfig) -> None:
    """Mark what stays as it is. Frozen blocks also stay in evaluation mode, so that their statistics do not move."""
    if options.freeze_until is not None:
        freeze_before(network, options.freeze_until)
    if options.variable_filter:
        _keep_named(network, options.variable_filter)


def freeze_before(network: Network, block: str) -> None:
    """Freeze every block before the named one; a folder (`layer4`) means its first block."""
    names = list(network.blocks)
    first = next((index for index, name in enumerate(names) if name == block or name.startswith(f"{block}/")), None)
    if first is None:
        raise ConfigError(f"freeze-until={block}: the network has no such block; {suggest(block, names)}")
    network.freeze(names[:first])


def _keep_named(network: Network, parts: tuple[str, ...]) -> None:
    chosen = {name for name, _ in network.named_parameters() if any(part in name for part in parts)}
    if not chosen:
        known = sorted({name.rpartition(".")[0] for name, _ in network.named_parameters()})
        raise ConfigError(
            f"variable-filter={','.join(parts)}: no parameter has that in its name; {suggest(parts[0], known)}"
        )
    for name, parameter in network.named_parameters():
        if name not in chosen:
            parameter.requires_grad_(False)
