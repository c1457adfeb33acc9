"""Benchmark worker: `DistributedDataParallel` over gloo in a typical PyTorch loop, two processes of one thread.

    python benchmarks/plain_ddp.py resnet20|lenet BATCH STEPS

BATCH is that of a process, STEPS those of a turn. Each process has one batch in memory, channels-last, the fused
optimizer and an allocator that keeps freed memory, as in `loops.py tuned`.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from loops import keep_freed_memory
from pairs import open_pair, serve_pair
from plain_networks import build
from turns import timed


def build_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "lenet":
        return torch.optim.Adam(model.parameters(), 0.003, fused=True)
    return torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True, fused=True)


def any_rank(flag: bool) -> bool:
    flags = torch.tensor(float(flag))
    dist.all_reduce(flags)
    return bool(flags)


def main() -> None:
    name, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rank = open_pair()
    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    network, shape, classes = build(name)
    network = network.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = DistributedDataParallel(network)
    images = torch.randn(batch, *shape).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(classes, (batch,))
    optimizer = build_optimizer(name, model)

    def train(count: int = steps) -> int:
        for _ in range(count):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
        return 2 * count * batch

    train(2)
    serve_pair(rank, timed(train), any_rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
