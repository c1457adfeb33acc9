"""An augmentation by name: images move by up to two pixels, around their edges. Its numbers belong to each sample.

convolve train --plugin examples/plugins/augmentation.py --augment roll --dataset digits
"""

import numpy as np
from torch import Tensor

import convolve


@convolve.augmentations.register("roll")
def roll(image: Tensor, rng: np.random.Generator) -> Tensor:
    """Return a moved image, uint8 [C, H, W]."""
    down, right = rng.integers(-2, 3, 2).tolist()
    return image.roll((down, right), (1, 2))
