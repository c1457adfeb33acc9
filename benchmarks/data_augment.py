"""Cost of augmenting CIFAR batches: milliseconds per batch of 128 images, including normalization, on all threads.

    python benchmarks/data_augment.py

The images are random, since contents do not matter. The minimum over many batches counts, which excludes load from
other processes. Exits with 1 if pad-crop-flip takes more than 3 ms.
"""

import sys
import time
from typing import Any

from convolve import device

device.prepare()

import torch  # noqa: E402

from convolve.config.schema import DataConfig  # noqa: E402
from convolve.data.build import fit_normalization, open_train_loader  # noqa: E402
from convolve.data.lookup import generated_split  # noqa: E402

LIMIT_MS = 3.0
CASES: dict[str, dict[str, Any]] = {
    "none": {"augment": "none"},
    "pad-crop-flip": {},
    "pad-crop-flip, cutout": {"cutout": 8},
    "pad-crop-flip, mixup": {"mixup_alpha": 0.2},
    "pad-crop-flip, cutmix": {"cutmix_lambda": 0.8},
    "color jitter": {"color_jitter": (0.4, 0.4, 0.4)},
    "RandAugment, 2 layers": {"randaugment_layers": 2},
    "resized crop": {"augment": "resized-crop-flip"},
}


def main() -> int:
    torch.set_num_threads(device.available_threads())
    split = generated_split(10_000, 32, 3, 10, seed=0)
    best = {}
    for name, options in CASES.items():
        config = DataConfig(normalization="symmetric", **options)
        batches = open_train_loader(split, fit_normalization(split, config), torch.device("cpu"), config).step_batches(
            0, 0, 128, 128
        )
        next(batches)
        times = []
        for _ in range(60):
            start = time.perf_counter()
            next(batches)
            times.append(time.perf_counter() - start)
        best[name] = min(times) * 1000
        print(f"{name:<24} {best[name]:6.2f} ms")
    return int(best["pad-crop-flip"] > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
