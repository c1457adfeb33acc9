"""What a training run is at one moment: weights, optimiser state, and two integers."""

from dataclasses import dataclass
from typing import Any

import torch

from convolve.checkpoint.snapshot import Snapshot
from convolve.errors import CheckpointError
from convolve.models.network import Network
from convolve.optim.optimisers import load_state, state_tensors


@dataclass
class TrainState:
    """Everything that a step reads and changes. `samples` is the position in the data; nothing else has to be kept."""

    model: Network
    optimiser: torch.optim.Optimizer
    step: int = 0
    samples: int = 0

    def snapshot(self, facts: dict[str, Any]) -> Snapshot:
        """The state as named tensors and plain values; `facts` are added to the plain values."""
        tensors = {"model": dict(self.model.state_dict()), "optimizer": state_tensors(self.optimiser, self.model)}
        return Snapshot(tensors, {"step": self.step, "samples": self.samples, **facts})

    def restore(self, snapshot: Snapshot) -> None:
        """Become the state that a snapshot holds, bit for bit."""
        load_weights(self.model, snapshot)
        load_state(self.optimiser, self.model, snapshot.tensors.get("optimizer", {}))
        self.step, self.samples = int(snapshot.state["step"]), int(snapshot.state["samples"])


def load_weights(model: torch.nn.Module, snapshot: Snapshot) -> None:
    """Put a snapshot's weights into a model; names and shapes must be the model's."""
    stored, own = snapshot.tensors["model"], model.state_dict()
    odd = sorted(set(stored) ^ set(own)) or [name for name in own if own[name].shape != stored[name].shape]
    if odd:
        raise CheckpointError(
            f"weights '{odd[0]}' do not fit the model; use the config that the checkpoint was made with"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])
