"""Benchmark worker: `lenet-bn` in Paddle's high-level interface, tensors in memory.

paddle_peer.py MNIST.npz STEPS
"""

import sys

import numpy as np
import paddle
from paddle import nn

from turns import serve, timed

BATCH = 64


def main() -> None:
    data, steps = np.load(sys.argv[1]), int(sys.argv[2])
    images, labels = data["images"], data["labels"]
    x = paddle.to_tensor((images[:, None] / 127.5 - 1).astype("float32"))
    samples = paddle.io.TensorDataset([x, paddle.to_tensor(labels.astype("int64"))])
    layers = nn.Sequential(
        nn.Conv2D(1, 20, 5),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.BatchNorm2D(20),
        nn.Conv2D(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Flatten(),
        nn.Linear(800, 10),
    )
    model = paddle.Model(layers)
    model.prepare(paddle.optimizer.Adam(1e-3, parameters=layers.parameters()), nn.CrossEntropyLoss())

    def train(count: int = steps) -> int:
        model.fit(samples, batch_size=BATCH, epochs=1, verbose=0, shuffle=True, drop_last=True, num_iters=count)
        return count * BATCH

    train(20)
    serve(timed(train))


if __name__ == "__main__":
    main()
