"""Whether an optimizer of the user's code resumes exactly and updates each parameter independently of the others.

A few steps on copies of the parameters, with made-up gradients:

    three steps; two steps, state saved and loaded into a new optimizer, one step     same weights: resumes
    three steps of all parameters; three steps of every second one                    same weights: separable
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from convolve.errors import CheckpointError, ConfigError, describe
from convolve.layers.generators import keyed_generators
from convolve.optim.optimizers import Groups, is_number, load_state, set_learning_rate, state_tensors
from convolve.optim.user import UserOptimizer

RATE = 1e-3


@dataclass(frozen=True)
class OptimizerTrial:
    """Result of a trial. `changed` are numbers outside of `state`, which checkpoints do not store."""

    resumes: bool
    separable: bool
    changed: tuple[str, ...]


class _Copy:
    """An optimizer on copies of some parameters."""

    def __init__(self, user: UserOptimizer, groups: Groups, weights: Sequence[Tensor] | None = None) -> None:
        values = weights or [parameter for group in groups for parameter in group["params"]]
        self.weights = nn.ParameterList([nn.Parameter(value.detach().clone()) for value in values])
        remaining = iter(self.weights)
        copies = [{**group, "params": [next(remaining) for _ in group["params"]]} for group in groups]
        self.name, self.optimizer = user.name, user.build(copies, RATE)

    def advance(self, first: int, last: int, numbers: Sequence[int] | None = None) -> "_Copy":
        """Run some steps; `numbers` are those of the parameters, on which their gradients depend."""
        for step in range(first, last):
            set_learning_rate(self.optimizer, RATE)
            for number, weight in zip(numbers or range(len(self.weights)), self.weights, strict=True):
                line = torch.arange(weight.numel(), device=weight.device, dtype=weight.dtype)
                weight.grad = torch.empty_like(weight).copy_(torch.sin(line * (step + 1) + number).view(weight.shape))
            self._step(step)
        return self

    def _step(self, step: int) -> None:
        device = next((weight.device for weight in self.weights), torch.device("cpu"))
        try:
            with keyed_generators("optimizer trial", step, device=device):
                self.optimizer.step()
        except Exception as error:
            raise ConfigError(
                f"optimizer {self.name}: step() failed ({describe(error)}); it is called without a closure"
            ) from error
        for slots in self.optimizer.state.values():
            for slot, value in slots.items():
                if value is not None and not isinstance(value, Tensor) and not is_number(value):
                    raise ConfigError(
                        f"optimizer {self.name}: keeps a {type(value).__name__} in state '{slot}', which checkpoints "
                        "cannot store; keep tensors and numbers"
                    )


def try_optimizer(user: UserOptimizer, groups: Groups) -> OptimizerTrial:
    """Run the trial on copies. Parameters and random states stay as they are."""
    whole = _Copy(user, groups)
    before = _numbers(whole.optimizer)
    whole.advance(0, 3)
    changed = tuple(name for name, value in _numbers(whole.optimizer).items() if before.get(name, value) != value)
    first = _Copy(user, groups).advance(0, 2)
    stored = {name: tensor.clone() for name, tensor in state_tensors(first.optimizer, first.weights).items()}
    second = _Copy(user, groups, list(first.weights))
    try:
        load_state(second.optimizer, second.weights, stored, any_shape=True)
        resumes = _same(second.advance(2, 3).weights, whole.weights)
    except (CheckpointError, ConfigError):
        resumes = False
    return OptimizerTrial(resumes, _is_separable(user, groups, whole), changed)


def _is_separable(user: UserOptimizer, groups: Groups, whole: _Copy) -> bool:
    numbers: list[int] = []
    halves: Groups = []
    count = 0
    for group in groups:
        chosen = [i for i in range(len(group["params"])) if (count + i) % 2 == 0]
        numbers += [count + i for i in chosen]
        halves.append({**group, "params": [group["params"][i] for i in chosen]})
        count += len(group["params"])
    half = _Copy(user, halves).advance(0, 3, numbers)
    return _same(half.weights, [whole.weights[number] for number in numbers])


def _same(weights: Sequence[Tensor] | nn.ParameterList, others: Sequence[Tensor] | nn.ParameterList) -> bool:
    return all(
        torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())
        for one, other in zip(weights, others, strict=True)
    )


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the numbers that an optimizer keeps in its parameter groups and attributes."""
    groups = {
        f"'{key}' of its parameter groups": value
        for group in optimizer.param_groups
        for key, value in group.items()
        if key != "lr" and is_number(value)
    }
    return groups | {f"its attribute '{key}'": value for key, value in vars(optimizer).items() if is_number(value)}
