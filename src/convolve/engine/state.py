"""State of a training run: weights, optimizer state, position, loss scale, average of the weights."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from convolve.checkpoint.snapshot import Snapshot
from convolve.distributed.partition import LocalShard
from convolve.distributed.topology import Topology
from convolve.engine.ema import NoEMA, WeightAverage
from convolve.errors import CheckpointError
from convolve.models.network import Network
from convolve.numerics.execution import Execution, PlainExecution
from convolve.numerics.loss_scaling import NoScaling, Scaler
from convolve.optim.optimizers import load_state, state_tensors

ONE_PROCESS = Topology()


@dataclass
class TrainState:
    """Everything that a step reads and changes. `samples` is the position in the data; the order follows from it.

    `any_slot_shape` is set for an optimizer of the user's code, whose state may have other shapes than the weights.
    """

    model: Network
    optimizer: torch.optim.Optimizer
    step: int = 0
    samples: int = 0
    execution: Execution = field(default_factory=PlainExecution)
    scaler: Scaler = field(default_factory=NoScaling)
    ema: WeightAverage = field(default_factory=NoEMA)
    shard: LocalShard = field(default_factory=LocalShard)
    any_slot_shape: bool = False

    def snapshot(self, metadata: dict[str, Any], topology: Topology = ONE_PROCESS) -> Snapshot:
        """Return the tensors of the state that this process writes, and plain values, `metadata` among them.

        The first replica writes weights and averages. If the optimizer state is sharded, every process writes its own.
        """
        stage, rank = (topology.stage, topology.stages), (topology.rank, topology.world)
        slices = {"model": stage, "optimizer": rank if self.shard.is_sharded else stage, "averages": stage}
        tensors: dict[str, dict[str, Tensor]] = {}
        if topology.replica == 0:
            tensors["model"] = self.model.state_dict()
        if topology.replica == 0 or self.shard.is_sharded:
            tensors["optimizer"] = state_tensors(self.optimizer, self.model)
        if topology.replica == 0 and (averages := self.ema.tensors()):
            tensors["averages"] = averages
        values = {"step": self.step, "samples": self.samples, "scaling": self.scaler.state_dict()}
        return Snapshot(tensors, {**values, "numerics": self.execution.policy.to_json(), **metadata}, slices)

    def holds(self, part: str, name: str) -> bool:
        """Return whether this process holds a tensor of a checkpoint."""
        return self.shard.holds(name) and (part != "optimizer" or self.shard.holds_state(name))

    def load_weights(self, snapshot: Snapshot) -> None:
        """Load this process's part of the weights of a snapshot."""
        local = self.shard.select(snapshot.tensors.get("model", {}))
        load_weights(self.model, Snapshot({"model": local}, snapshot.state))

    def restore(self, snapshot: Snapshot) -> None:
        """Load a snapshot, bit for bit."""
        local = {part: self.shard.select(tensors) for part, tensors in snapshot.tensors.items()}
        self.load_weights(snapshot)
        slots = self.shard.select_state(local.get("optimizer", {}))
        load_state(self.optimizer, self.model, slots, any_shape=self.any_slot_shape)
        self.ema.restore(local.get("averages", {}))
        self.step, self.samples = snapshot.step, snapshot.count("samples")
        try:
            self.scaler.load_state_dict(dict(snapshot.state.get("scaling", {})))
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"state has an invalid loss scale ({error}); use another checkpoint") from None


def load_weights(model: torch.nn.Module, snapshot: Snapshot) -> None:
    """Copy the weights of a snapshot into a model; names and shapes must match."""
    stored, current = snapshot.tensors.get("model", {}), model.state_dict()
    names = sorted(set(stored) ^ set(current))
    names = names or [name for name in current if current[name].shape != stored[name].shape]
    if names:
        raise CheckpointError(
            f"weights '{names[0]}' do not fit the model; use the config that the checkpoint was made with"
        )
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(stored[name])
