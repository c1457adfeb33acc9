"""The order of samples: a pure function of (seed, epoch). No worker, prefetch depth or replica count can change it."""

import numpy as np
import numpy.typing as npt

from convolve.randomness import generator

Order = npt.NDArray[np.int64]


def epoch_order(seed: int, epoch: int, count: int) -> Order:
    """The sample numbers of one epoch, each once."""
    return generator(seed, "order", epoch).permutation(count).astype(np.int64)
