"""Build optimizers by name, and convert their state to and from named tensors.

State is stored under `<parameter name>.<slot>`, not under positions. So a checkpoint fits any layout that has the
parameter, and nothing is pickled. Numbers are stored under `<slot>:int` and the like.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from convolve.config import OptimConfig
from convolve.errors import CheckpointError, ConfigError
from convolve.optim.update_rules import Lars, Muon, RMSpropTF
from convolve.optim.user import UserOptimizer, find_optimizer

Groups = list[dict[str, Any]]
OwnsFn = Callable[[str], bool]
RateFn = Callable[[str], float]


def parameter_groups(
    model: nn.Module, config: OptimConfig, owns: OwnsFn = lambda name: True, rate: RateFn = lambda name: 1.0
) -> Groups:
    """Group the trainable parameters by weight decay and learning-rate factor; those that decay come first.

    Norms and biases are the parameters with at most one dimension. `set_learning_rate` multiplies the learning rate by
    the `rate_factor` of a group. Parameters that another process updates are skipped, but their groups exist.
    """
    groups: dict[tuple[bool, float, float], list[nn.Parameter]] = {
        (True, config.weight_decay, 1.0): [],
        (False, 0.0, 1.0): [],
    }
    biases = _layer_biases(model) if config.weight_decay_on == "layers" else set()
    for name, parameter in _parameters(model):
        factor = rate(name) * (config.bias_rate_factor if parameter.ndim <= 1 else 1.0)
        decay = _weight_decay(name, parameter, config, biases)
        group = groups.setdefault((decay is not None, decay or 0.0, factor), [])
        if owns(name):
            group.append(parameter)
    if not any(_parameters(model)):
        raise ConfigError("no trainable parameters; widen --variable-filter or move --freeze-until")
    return [
        {"params": parameters, "weight_decay": decay, "rate_factor": factor}
        for (_, decay, factor), parameters in groups.items()
    ]


def _layer_biases(model: nn.Module) -> set[str]:
    """Return the biases of convolutions and linear layers, whose weight has two dimensions or more."""
    names = dict(_parameters(model))
    return {
        name
        for name in names
        if name.endswith("bias") and (weight := names.get(f"{name[:-4]}weight")) is not None and weight.ndim > 1
    }


def _weight_decay(name: str, parameter: nn.Parameter, config: OptimConfig, biases: Container[str]) -> float | None:
    """Return the weight decay of a parameter. None, the default for norms and biases, means that it does not decay."""
    if any(part in name for part in config.weight_decay_exclude):
        return None
    if parameter.ndim <= 1 and config.bias_weight_decay is not None:
        return config.bias_weight_decay
    decays = parameter.ndim > 1 or config.weight_decay_on == "all" or name in biases
    return config.weight_decay if decays else None


def _sgd(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.learning_rate, fused=True)


def _momentum(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    momentum, nesterov = config.momentum, config.nesterov
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=momentum, nesterov=nesterov, fused=True)


def _adam(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.learning_rate, betas=config.adam_betas, eps=config.optimizer_epsilon, fused=True)


def _rmsprop(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(
        groups,
        lr=config.learning_rate,
        alpha=config.rmsprop_decay,
        eps=config.optimizer_epsilon,
        momentum=config.momentum,
    )


def _rmsprop_tf(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    return RMSpropTF(
        groups,
        lr=config.learning_rate,
        decay=config.rmsprop_decay,
        momentum=config.momentum,
        epsilon=config.optimizer_epsilon,
    )


def _lars(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    decaying, *others = groups
    marked = [{**decaying, "plain": False}, *({**group, "plain": True} for group in others)]
    return Lars(
        marked,
        lr=config.learning_rate,
        momentum=config.momentum,
        eeta=config.lars_eeta,
        epsilon=config.lars_epsilon,
    )


def _muon(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    split: Groups = []
    for group in groups:
        convolutions = [parameter for parameter in group["params"] if parameter.ndim == 4]
        rest = [parameter for parameter in group["params"] if parameter.ndim != 4]
        factor = group["rate_factor"] * config.muon_rest_factor
        split.append({**group, "params": convolutions, "orthogonal": True})
        momentum = config.momentum if config.muon_rest_momentum is None else config.muon_rest_momentum
        split.append({**group, "params": rest, "orthogonal": False, "rate_factor": factor, "momentum": momentum})
    return Muon(
        split,
        lr=config.learning_rate,
        momentum=config.momentum,
        rounds=config.muon_rounds,
        fixed_norm=config.muon_fixed_norm,
    )


OPTIMIZERS: dict[str, Callable[[Groups, OptimConfig], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "adamw": _adam,
    "rmsprop": _rmsprop,
    "rmsprop-tf": _rmsprop_tf,
    "lars": _lars,
    "muon": _muon,
}


def select_optimizer(config: OptimConfig, given: UserOptimizer | None = None) -> UserOptimizer | None:
    """Return the optimizer of the user's code: the given one, or that of the name in a config; None: a built-in one."""
    return given or find_optimizer(config.optimizer, OPTIMIZERS.get(config.optimizer))


def build_optimizer(
    model: nn.Module,
    config: OptimConfig,
    owns: OwnsFn = lambda name: True,
    rate: RateFn = lambda name: 1.0,
    given: UserOptimizer | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer for the parameters of a model, or for those that this process owns.

    `rate` returns a factor on the learning rate of a parameter. `given` replaces the optimizer of the config.
    """
    groups, user = parameter_groups(model, config, owns, rate), select_optimizer(config, given)
    return OPTIMIZERS[config.optimizer](groups, config) if user is None else user.build(groups, config.learning_rate)


def count_moments(config: OptimConfig) -> tuple[int, int]:
    """Return how many first moments (velocities) and second moments (mean squares) an optimizer stores per weight."""
    velocities = int(config.momentum > 0)
    user = select_optimizer(config)
    if user is not None:
        return _count_slots(user), 0
    return {
        "sgd": (0, 0),
        "momentum": (velocities, 0),
        "adam": (1, 1),
        "adamw": (1, 1),
        "rmsprop": (velocities, 1),
        "rmsprop-tf": (1, 1),
        "lars": (1, 0),
        "muon": (1, 0),
    }[config.optimizer]


def _count_slots(user: UserOptimizer) -> int:
    """Return how many tensors an optimizer stores per weight, found by a step on one parameter."""
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = user.build([{"params": [weight], "weight_decay": 0.0, "rate_factor": 1.0}], 1e-3)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    slots = optimizer.state.get(weight, {}).values()
    return sum(isinstance(value, Tensor) and value.shape == weight.shape for value in slots)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)


def _parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


_NUMBERS: dict[str, type] = {"bool": bool, "int": int, "float": float}


def is_number(value: object) -> bool:
    """Return whether a value of an optimizer's state is a number of Python."""
    return isinstance(value, bool | int | float)


def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer state by parameter name and slot."""
    found: dict[str, Tensor] = {}
    for name, parameter in _parameters(model):
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}.{slot}"] = value
            elif is_number(value):
                kind = torch.float64 if isinstance(value, float) else torch.int64
                found[f"{name}.{slot}:{type(value).__name__}"] = torch.tensor(value, dtype=kind)
    return found


def load_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], *, any_shape: bool = False
) -> None:
    """Load stored state in the memory layout of the parameters; fused optimizers iterate over memory, not indices.

    `any_shape` is for optimizers of the user's code, whose state may have other shapes than the weights.
    """
    strict = not any_shape or any(group.get("fused") for group in optimizer.param_groups)
    unused = set(tensors)
    for name, parameter in _parameters(model):
        slots: dict[str, Any] = {}
        for key in [key for key in unused if key.rpartition(".")[0] == name]:
            stored = tensors[key]
            if strict and stored.shape != parameter.shape and stored.numel() != 1:
                # Fused optimizers would read and write beyond its end.
                raise CheckpointError(f"optimizer.safetensors: '{key}' has another shape than its weight")
            slot, _, kind = key.rpartition(".")[2].partition(":")
            like = parameter if stored.shape == parameter.shape else stored
            slots[slot] = _read_number(key, kind, stored) if kind else torch.empty_like(like, dtype=stored.dtype)
            if not kind:
                slots[slot].copy_(stored)
            unused.discard(key)
        if slots:
            optimizer.state[parameter] = slots
    if unused:
        raise CheckpointError(
            f"optimizer.safetensors: unexpected key '{sorted(unused)[0]}' ({len(unused)} in total); "
            "restore with the config of the checkpoint"
        )


def _read_number(key: str, kind: str, stored: Tensor) -> object:
    if kind not in _NUMBERS or stored.numel() != 1:
        raise CheckpointError(f"optimizer.safetensors: '{key}' is no number; use another checkpoint")
    return _NUMBERS[kind](stored.item())
