"""Benchmark worker: a typical PyTorch training loop on one batch in memory.

    python benchmarks/loops.py plain|tuned|compiled resnet20|resnet50 BATCH STEPS

`plain` is the loop of the tutorials: NCHW, eager, SGD with momentum. `tuned` is optimized by hand: channels-last, the
fused optimizer, and an allocator that keeps freed memory. `compiled` is the tuned loop with `torch.compile`.
"""

import ctypes
import sys

import torch
from torch.nn import functional

from plain_networks import build
from turns import serve, timed

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def main() -> None:
    kind, name, batch, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    tuned = kind != "plain"
    if tuned:
        keep_freed_memory()
    model, shape, classes = build(name)
    model.train()
    layout = torch.channels_last if tuned else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(batch, *shape).contiguous(memory_format=layout)
    labels = torch.randint(classes, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, fused=True if tuned else None)
    if kind == "compiled":
        model.compile()

    def train(count: int = steps) -> int:
        for _ in range(count):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            torch.autograd.backward(loss)
            optimizer.step()
        return count * batch

    train(2)
    serve(timed(train))


if __name__ == "__main__":
    main()
