"""Update rules, and their state as named tensors.

State is stored under `<parameter name>.<slot>`, not under positions: a checkpoint then fits any layout that has the
parameter, and nothing has to be pickled.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from convolve.config import OptimConfig
from convolve.errors import CheckpointError

Groups = list[dict[str, object]]


def parameter_groups(model: nn.Module, config: OptimConfig) -> Groups:
    """Parameters that decay and parameters that do not; norms and biases have one dimension."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decays = [config.weight_decay_on == "all" or parameter.ndim > 1 for parameter in trained]
    return [
        {"params": [p for p, yes in zip(trained, decays, strict=True) if yes], "weight_decay": config.weight_decay},
        {"params": [p for p, yes in zip(trained, decays, strict=True) if not yes], "weight_decay": 0.0},
    ]


def _sgd(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.learning_rate, fused=True)


def _momentum(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        groups, lr=config.learning_rate, momentum=config.momentum, nesterov=config.nesterov, fused=True
    )


def _adam(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        groups, lr=config.learning_rate, betas=config.adam_betas, eps=config.optimiser_epsilon, fused=True
    )


def _adamw(groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.adam_betas, eps=config.optimiser_epsilon, fused=True
    )


RULES: dict[str, Callable[[Groups, OptimConfig], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "adamw": _adamw,
}


def build_optimiser(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The update rule for a model's parameters."""
    return RULES[config.optimiser](parameter_groups(model, config), config)


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Use this learning rate from the next update on."""
    for group in optimiser.param_groups:
        group["lr"] = rate


def _parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def state_tensors(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state by parameter name and slot."""
    return {
        f"{name}.{slot}": value
        for name, parameter in _parameters(model)
        for slot, value in optimiser.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_state(optimiser: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put stored state back, in the memory layout of the parameters (fused rules walk memory, not indices)."""
    left = set(tensors)
    for name, parameter in _parameters(model):
        slots = {}
        for key in [key for key in left if key.rpartition(".")[0] == name]:
            stored = tensors[key]
            like = parameter if stored.shape == parameter.shape else stored
            slots[key.rpartition(".")[2]] = torch.empty_like(like, dtype=stored.dtype).copy_(stored)
            left.discard(key)
        if slots:
            optimiser.state[parameter] = slots
    if left:
        raise CheckpointError(
            f"optimizer.safetensors: state for '{sorted(left)[0]}', which this model does not have; "
            "restore with the config that the checkpoint was made with"
        )
