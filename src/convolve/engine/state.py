"""State of a training run: weights, optimizer state, position, loss scale, average of the weights."""

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

    def snapshot(self, metadata: dict[str, Any], collectives: Collectives | None = None) -> Snapshot:
        """Return the state as named tensors and plain values, `metadata` among them.

        The snapshot is independent of the layout. With several processes, only rank 0 gets all tensors.
        """
        collectives = collectives or SingleProcess()
        local_state = state_tensors(self.optimizer, self.model)
        tensors = {
            "model": collectives.collect(self.model.state_dict()),
            "optimizer": collectives.collect(local_state, from_replicas=self.shard.is_sharded),
        }
        averages = collectives.collect(self.ema.tensors())
        if averages:
            tensors["averages"] = averages
        values = {"step": self.step, "samples": self.samples, "scaling": self.scaler.state_dict()}
        return Snapshot(tensors, {**values, "numerics": self.execution.policy.to_json(), **metadata})

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
