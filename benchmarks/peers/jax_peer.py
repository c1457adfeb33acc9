"""Benchmark worker: `lenet-bn` in JAX with Flax and Optax; images are JAX arrays, a step is one compiled function.

jax_peer.py MNIST.npz STEPS
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from turns import serve, timed

BATCH = 64


class LeNet(nn.Module):  # type: ignore[misc]
    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        x = nn.max_pool(nn.relu(nn.Conv(20, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        x = nn.max_pool(nn.relu(nn.Conv(50, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


def main() -> None:
    data, steps = np.load(sys.argv[1]), int(sys.argv[2])
    images, labels = data["images"], data["labels"]
    pixels, classes = jnp.asarray(images)[..., None], jnp.asarray(labels, jnp.int32)
    model, optimizer = LeNet(), optax.adam(1e-3)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 28, 28, 1)))
    state = (variables["params"], variables["batch_stats"], optimizer.init(variables["params"]))

    @jax.jit  # type: ignore[untyped-decorator]
    def step(state: Any, rows: Any) -> tuple[Any, Any]:
        params, stats, moments = state
        x, y = pixels[rows].astype(jnp.float32) / 127.5 - 1, classes[rows]

        def lose(params: Any) -> tuple[Any, Any]:
            given = {"params": params, "batch_stats": stats}
            logits, updated = model.apply(given, x, mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return loss, updated["batch_stats"]

        (loss, stats), gradient = jax.value_and_grad(lose, has_aux=True)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), stats, moments), loss

    def train(count: int = steps) -> int:
        nonlocal state
        order = np.random.permutation(len(images))
        for first in range(0, count * BATCH, BATCH):
            state, loss = step(state, order[first : first + BATCH])
        jax.block_until_ready(loss)
        return count * BATCH

    train(20)
    serve(timed(train))


if __name__ == "__main__":
    main()
