"""Benchmark worker: EfficientNet-B0 in the loop of timm's train script with its defaults, on one batch that is already
there.

    timm_peer.py BATCH STEPS

As there: NCHW, SGD with momentum 0.9 and weight decay 2e-5, smoothed labels, the loss read and metered at every step, a
cosine schedule updated at every step.
"""

import sys
import time

import torch

import peers.torchvision_ops  # noqa: F401

# isort: split
from timm import create_model
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter

from turns import serve, timed


def main() -> None:
    batch, steps = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(42)
    model = create_model("efficientnet_b0").train()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9, weight_decay=2e-5)
    schedule = CosineLRScheduler(optimizer, t_initial=300, warmup_t=5, warmup_lr_init=1e-5)
    loss_fn = LabelSmoothingCrossEntropy(0.1)
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    losses, batch_time, updates = AverageMeter(), AverageMeter(), 0

    def train(count: int = steps) -> int:
        nonlocal updates
        for _ in range(count):
            start = time.time()
            loss = loss_fn(model(images), labels)
            losses.update(loss.item(), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updates += 1
            batch_time.update(time.time() - start)
            schedule.step_update(num_updates=updates, metric=losses.avg)
        return count * batch

    train(1)
    serve(timed(train))


if __name__ == "__main__":
    main()
