"""Options that name a built-in part or one of the user's code: `name` of a plugin, or `package:attribute`.

A config of a run may name code that is not loaded, so only configs that are about to be used are checked.
"""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from convolve import plugins
from convolve.config.schema import AugmentName, Config
from convolve.config.training import OptimizerName
from convolve.errors import suggest

_OF_BUILT_IN_OPTIMIZERS = ("momentum", "adam_betas", "optimizer_epsilon", "rmsprop_decay", "lars_eeta", "lars_epsilon")


def find_unknown_names(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each option that names nothing, and the problem."""
    for option, known, registry in (
        (config.optim.optimizer, get_args(OptimizerName), plugins.OPTIMIZERS),
        (config.data.augment, get_args(AugmentName), plugins.AUGMENTATIONS),
    ):
        names = {*known, *registry.names()}
        if ":" not in option and option not in names:
            closest = suggest(option, names)
            hint = "" if closest.endswith("?") else "; the name of a plugin needs --plugin FILE.py"
            yield registry.option, f"unknown {registry.kind}; {closest}{hint}"


def find_ineffective(config: Config, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about each option of built-in optimizers that is given for one of the user's code."""
    optimizer = config.optim.optimizer
    if optimizer not in get_args(OptimizerName):
        for option in _OF_BUILT_IN_OPTIMIZERS:
            if option in given:
                flag = option.replace("_", "-")
                yield f"--{flag} with --optimizer {optimizer}: has no effect; set it in the code of the optimizer"
