"""A data set by name: stripes, upright or lying, moved at random in training.

convolve train --plugin examples/plugins/dataset.py --dataset stripes --model lenet5
"""

import numpy as np

import convolve


class Stripes:
    classes = ("lying", "upright")

    def __len__(self) -> int:
        return 512

    def sample(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, int]:
        waves = np.sin(np.arange(28) / 2 + (index if rng is None else rng.uniform(0, 6)))
        image = np.broadcast_to(127 + 127 * waves, (28, 28)).astype(np.uint8)
        return (image if index % 2 else image.T)[:, :, None].copy(), index % 2


convolve.data.register("stripes")(lambda: (Stripes(), Stripes()))
