"""One rank of a job of any size in one process: torch's fake process group, and tensors without data.

Models, gradients and activations are on the meta device, so a step of any model takes as long as its Python code. The
operations of torch.distributed are recorded; they do nothing.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from convolve.data.build import DataModule
from convolve.data.dataset import Dataset
from convolve.data.loader.loader import MicroBatch, ReplicaShard, StepBatch
from convolve.data.lookup import generated_split
from convolve.data.transforms.normalize import Transform
from convolve.distributed import partition
from convolve.distributed.collectives import DistributedCollectives, new_group
from convolve.distributed.positions import Positions
from convolve.distributed.topology import Topology
from convolve.engine.build import build, build_numerics, build_on_meta
from convolve.engine.step import train_step
from convolve.numerics.loss_scaling import NoScaling
from convolve.optim.schedules import RunSpan

META = torch.device("meta")
OPERATIONS = {"allreduce_": "all_reduce", "allgather_": "all_gather", "alltoall_base_": "all_to_all"}
OPERATIONS |= {"broadcast_": "broadcast", "send": "send", "recv_": "recv"}


class Recorder(TorchDispatchMode):
    """Counts calls and the bytes that this rank gives to them, for tensors of the device."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            name = operation.name().removeprefix("c10d::")
            given = args[1] if name in ("allgather_", "alltoall_base_") else args[0]
            tensors = given if isinstance(given, list) else [given]
            if tensors[0].device.type == "meta":
                self.calls[OPERATIONS[name]] += 1
                self.bytes[OPERATIONS[name]] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return operation(*args, **(kwargs or {}))


@contextmanager
def fake_collectives(topology):
    """Open the process groups of one rank; nothing is sent."""
    dist.init_process_group("cpu:fake,meta:fake", rank=topology.rank, world_size=topology.world, store=FakeStore())
    try:
        replicas = new_group([topology.same_stage(stage) for stage in range(topology.stages)], topology.rank)
        stages = new_group([topology.same_replica(replica) for replica in range(topology.replicas)], topology.rank)
        yield DistributedCollectives(topology, replicas, stages, Positions())
    finally:
        dist.destroy_process_group()


def simulate_step(config, splits, rank, monkeypatch):
    """Run one training step of a rank; return its recorder and the model's shapes of this stage."""
    monkeypatch.setattr(partition, "require_equal_weights", lambda collectives, model: None)  # there are no weights
    monkeypatch.setattr(PipelineScheduleSingle, "_warmup_p2p", _agree_on_static_shapes)
    config = config.replace(
        pipeline_splits=list(splits) or ["auto"], precision="32.32", kernels="torch", metrics=False, device="cpu"
    )
    topology = Topology(config.parallel.replicas, config.parallel.shards, rank)
    with fake_collectives(topology) as collectives:
        model = build_on_meta(config)
        data = _fake_data(config, model)
        span = RunSpan(1_000_000, 1_000_000)
        # Loss scaling reads a number on the host, which is not there.
        numerics = replace(build_numerics(config, torch.device("cpu"), span, folder=Path()), scaler=NoScaling())
        state, parts = build(
            config=config, data=data, collectives=collectives, numerics=numerics, model=model, span=span
        )
        for group in state.optimizer.param_groups:
            group["fused"] = False  # torch has no fused update of tensors without data
        with Recorder() as recorder:
            train_step(state, _fake_batch(config, topology.replica, model.input_shape), parts)
    assert state.step == 1
    return recorder


def _agree_on_static_shapes(schedule, stages, has_backward, p2p_done):
    """Replace the messages, before the first step, by which stages agree that all of them know their shapes."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _fake_data(config, model):
    classes = tuple(str(number) for number in range(1000))
    images = generated_split(1000, 2, 3, 1000, 0)
    channels, height, width = model.input_shape
    transform = Transform(height, width, (0.5,) * channels, (0.5,) * channels)
    return DataModule(Dataset("none", images, images, classes, "nowhere"), transform, META, config.data, None)


def _fake_batch(config, replica, shape):
    size, count = config.optim.batch_size, config.micro_batches
    shard = ReplicaShard(replica, config.parallel.replicas, config.parallel.bn_span)
    numbers, leaves = shard.numbers(count), shard.leaves(count)
    batches = [
        MicroBatch(
            torch.empty(size, *shape, device=META).to(memory_format=torch.channels_last),
            torch.empty(size, dtype=torch.int64, device=META),
            number * size,
            number=number,
            leaf=leaf,
        )
        for number, leaf in zip(numbers, leaves, strict=True)
    ]
    return StepBatch(tuple(batches), config.global_batch_size, count=count, leaves=leaves)
