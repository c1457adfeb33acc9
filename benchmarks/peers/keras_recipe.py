"""The convnet that keras.io's "Simple MNIST convnet" shows, trained until it reaches an accuracy on the test images.

    keras_recipe.py MNIST.npz GOAL

32 and 64 convolutions of 3x3, each with a max-pool, dropout of a half, dense; Adam, batch 128, up to 15 epochs, a tenth
of the training images kept for its own validation. Prints a line after each epoch and ends at the goal.
"""

import sys
import time

import keras
import numpy as np

EPOCHS, BATCH = 15, 128


def main() -> None:
    data, goal = np.load(sys.argv[1]), float(sys.argv[2])
    x, test = (data[name][..., None].astype("float32") / 255 for name in ("images", "test_images"))
    y, test_labels = (keras.utils.to_categorical(data[name], 10) for name in ("labels", "test_labels"))
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, (3, 3), activation="relu"),
            layers.MaxPooling2D((2, 2)),
            layers.Conv2D(64, (3, 3), activation="relu"),
            layers.MaxPooling2D((2, 2)),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    for epoch in range(EPOCHS):
        start = time.perf_counter()
        model.fit(x, y, batch_size=BATCH, epochs=1, validation_split=0.1, verbose=0)
        accuracy = float(model.evaluate(test, test_labels, verbose=0)[1])
        print(f"epoch {epoch + 1} accuracy {accuracy:.4f} seconds {time.perf_counter() - start:.2f}", flush=True)
        if accuracy >= goal:
            break


if __name__ == "__main__":
    main()
