"""What a training run is at one moment: weights, optimizer state, two integers, and the loss scale."""

from dataclasses import dataclass, field
from typing import Any

import torch

from convolve.checkpoint.snapshot import Snapshot
from convolve.distributed.collectives import Collectives, SingleProcess
from convolve.distributed.partition import LocalShard
from convolve.engine.ema import NoEMA, WeightAverage
from convolve.errors import CheckpointError
from convolve.models.network import Network
from convolve.numerics.execution import Execution, PlainExecution
from convolve.numerics.loss_scaling import NoScaling, Scaler
from convolve.optim.optimizers import load_state, state_tensors


@dataclass
class TrainState:
    """Everything that a step reads and changes. `samples` is the position in the data; nothing else has to be kept."""

    model: Network
    optimizer: torch.optim.Optimizer
    step: int = 0
    samples: int = 0
    arithmetic: Execution = field(default_factory=PlainExecution)
    scaler: Scaler = field(default_factory=NoScaling)
    averager: WeightAverage = field(default_factory=NoEMA)
    holdings: LocalShard = field(default_factory=LocalShard)

    def snapshot(self, facts: dict[str, Any], team: Collectives | None = None) -> Snapshot:
        """The state as named tensors and plain values; `facts` are added to the plain values.

        Nothing in it tells of the layout: with several processes the first one gets all tensors under their own names.
        """
        team = team or SingleProcess()
        own = state_tensors(self.optimizer, self.model)
        tensors = {
            "model": team.collect(self.model.state_dict()),
            "optimizer": team.collect(own, from_replicas=self.holdings.shared_out),
        }
        averages = team.collect(self.averager.tensors())
        if averages:
            tensors["averages"] = averages
        plain = {"step": self.step, "samples": self.samples, "scaling": self.scaler.state_dict()}
        return Snapshot(tensors, {**plain, "numerics": self.arithmetic.policy.to_json(), **facts})

    def restore(self, snapshot: Snapshot) -> None:
        """Become the state that a snapshot holds, bit for bit."""
        here = {part: self.holdings.keep(tensors) for part, tensors in snapshot.tensors.items()}
        load_weights(self.model, Snapshot(here, snapshot.state))
        load_state(self.optimizer, self.model, self.holdings.keep_state(here.get("optimizer", {})))
        self.averager.restore(here.get("averages", {}))
        self.step, self.samples = int(snapshot.state["step"]), int(snapshot.state["samples"])
        self.scaler.load_state_dict(dict(snapshot.state.get("scaling", {})))


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
