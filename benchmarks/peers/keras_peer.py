"""Benchmark worker: `lenet-bn` in Keras on TensorFlow, as its guides show: arrays in memory, `compile` and `fit`.

keras_peer.py MNIST.npz STEPS
"""

import sys

import keras
import numpy as np

from turns import serve, timed

BATCH = 64


def main() -> None:
    data, steps = np.load(sys.argv[1]), int(sys.argv[2])
    images, labels = data["images"], data["labels"]
    x = (images[..., None] / 127.5 - 1).astype("float32")
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(20, 5, activation="relu"),
            layers.MaxPool2D(),
            layers.BatchNormalization(),
            layers.Conv2D(50, 5, activation="relu"),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)

    def train(count: int = steps) -> int:
        images = count * BATCH
        model.fit(x[:images], labels[:images], batch_size=BATCH, epochs=1, verbose=0)
        return images

    train(50)
    serve(timed(train))


if __name__ == "__main__":
    main()
