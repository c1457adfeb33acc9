"""Effect of the data set size on the time of a step, of the start of an epoch and of an index.

    python benchmarks/scaling.py [--rounds 5] [--samples 1280000] [--indexed 100000]

In memory: LeNet on random digits, 10,000 and as many as ImageNet has, alternating. Target: a step on the large set
costs at most 1.1 times one on the small set. In tar files: the index of the large set takes at most 1.5 times as long
per image as that of a set ten times smaller; data_seek.py limits opening and seeking. Exits with 1 if a target is
missed.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from convolve import device

device.prepare()

import torch  # noqa: E402

from convolve.config import ModelConfig, OptimConfig  # noqa: E402
from convolve.data.loader.loader import Loader  # noqa: E402
from convolve.data.lookup import generated_split  # noqa: E402
from convolve.data.transforms.augment import NO_AUGMENT  # noqa: E402
from convolve.data.transforms.normalize import Transform  # noqa: E402
from convolve.engine.forward_backward import ForwardBackward, PassContext  # noqa: E402
from convolve.engine.loop import fit  # noqa: E402
from convolve.engine.metrics import CrossEntropy  # noqa: E402
from convolve.engine.state import TrainState  # noqa: E402
from convolve.engine.step import StepParts  # noqa: E402
from convolve.models import registry  # noqa: E402
from convolve.optim.optimizers import build_optimizer  # noqa: E402
from convolve.rng import epoch_permutation  # noqa: E402
from data_seek import make_samples, open_timed, seek, write_tars  # noqa: E402
from turns import check_limit  # noqa: E402

SMALL, BATCH, STEPS = 10_000, 64, 50
STEP_LIMIT, INDEX_LIMIT = 1.1, 1.5


class SmallRun:
    """A small model, trained on a data set of some size by the loop of convolve."""

    def __init__(self, samples: int) -> None:
        split = generated_split(samples, 28, 1, 10, seed=0)
        start = time.perf_counter()
        transform, cpu = Transform(28, 28, (0.5,), (0.5,)), torch.device("cpu")
        self.loader = Loader(split.fetcher(transform, NO_AUGMENT, cpu), transform, cpu)
        options = ModelConfig(model="lenet-bn")
        model = registry.build("lenet-bn", classes=10, input_shape=(1, 28, 28), seed=0, options=options)
        self.state = TrainState(model, build_optimizer(model, OptimConfig(optimizer="adam")))
        executor = ForwardBackward(model=model, loss=CrossEntropy(), context=PassContext(0))
        self.parts = StepParts(schedule=lambda samples: 1e-3, forward_backward=executor)
        self.batches = self.loader.step_batches(0, 0, BATCH, BATCH)
        self.run(1)
        self.first_seconds = time.perf_counter() - start

    def run(self, steps: int) -> float:
        """Return the seconds of a step, within the first epoch."""
        start = time.perf_counter()
        fit(self.state, self.batches, self.parts, [], total=self.state.samples + steps * BATCH)
        return (time.perf_counter() - start) / steps


def measure_steps(large: int, rounds: int) -> bool:
    start = time.perf_counter()
    epoch_permutation(0, 1, large)
    print(f"order of an epoch of {large:,}: {time.perf_counter() - start:.3f} s")
    runs = {count: SmallRun(count) for count in (SMALL, large)}
    times: dict[int, list[float]] = {count: [] for count in runs}
    for number in range(rounds + 1):
        for count, run in runs.items():
            seconds = run.run(min(STEPS, SMALL // BATCH // (rounds + 2)))
            if number:
                times[count].append(seconds)
    for count, run in runs.items():
        step = 1000 * median(times[count])
        print(f"{count:>9,} samples: {step:.2f} ms per step; {run.first_seconds:.2f} s to the end of the first")
    ratio = median(large_one / small for small, large_one in zip(*times.values(), strict=True))
    return check_limit("step of the large set / of the small one", ratio, STEP_LIMIT, "times")


def measure_index(large: int) -> bool:
    per_million = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["CONVOLVE_CACHE"] = f"{scratch}/cache"
        for count in (large // 10, large):
            root = Path(scratch, str(count))
            write_tars(root, make_samples(count), make_samples(10), max(1, count // 10_000))
            _, indexing = open_timed(root)
            dataset, opening = open_timed(root)
            seek(dataset, 0)
            seek_seconds = seek(dataset, count // 2)
            per_million[count] = indexing / count * 1e6
            print(
                f"{count:>9,} in tars: index {indexing:.2f} s ({per_million[count]:.1f} s per million), "
                f"opened again {opening:.3f} s, first batch from the middle {seek_seconds:.3f} s"
            )
    small, whole = per_million.values()
    return check_limit("index per image, large / small", whole / small, INDEX_LIMIT, "times")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1_280_000)
    parser.add_argument("--indexed", type=int, default=100_000)
    options = parser.parse_args()
    torch.set_num_threads(device.available_threads())
    passed = [measure_steps(options.samples, options.rounds), measure_index(options.indexed)]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
