"""Random numbers for samples: pure functions of (seed, epoch, sample), so no worker and no batch can change them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convolve.randomness import uniforms

_MOST = 64


@dataclass(frozen=True)
class Draw:
    """What random choices about a sample are keyed by, besides the sample itself."""

    seed: int
    epoch: int

    def numbers(self, samples: npt.NDArray[np.int64], count: int, what: str) -> npt.NDArray[np.float64]:
        """`count` doubles in [0, 1) for each sample: [N, count]."""
        assert count <= _MOST, f"{count} numbers for one choice, at most {_MOST} have keys of their own"
        counters = samples[:, None] * _MOST + np.arange(count)
        return uniforms(counters, self.seed, what, self.epoch)

    def coins(self, samples: npt.NDArray[np.int64], what: str) -> npt.NDArray[np.bool_]:
        """A fair coin for each sample."""
        heads: npt.NDArray[np.bool_] = uniforms(samples, self.seed, what, self.epoch) < 0.5
        return heads

    def flips(self, samples: npt.NDArray[np.int64], alternating: bool) -> npt.NDArray[np.bool_]:
        """Which samples are mirrored: by a new coin in each epoch, or each one in every second epoch."""
        if not alternating:
            return self.coins(samples, "flip")
        first = uniforms(samples, self.seed, "flip") < 0.5
        return np.logical_xor(first, bool(self.epoch & 1))
