"""A player for the benchmarks: convolve's own training in turns.

    python benchmarks/ours.py STEPS [options of `convolve bench train`]

Every turn trains for some steps and answers with images/s, the rate of matrix products right after it, and the
multiply-adds of one image.
"""

import sys
import tempfile
from pathlib import Path

from convolve import device

device.prepare()

from convolve.bench.train import BenchPlan, measure_matmul, open_bench_run  # noqa: E402
from convolve.cli.command import Parser, add_config_flags, read_config  # noqa: E402
from convolve.compat.options import translate  # noqa: E402
from convolve.distributed.collectives import SingleProcess  # noqa: E402
from convolve.loggers.base import SilentConsole  # noqa: E402
from turns import Turn, serve, timed  # noqa: E402


def main() -> None:
    steps, argv = int(sys.argv[1]), sys.argv[2:]
    parser = Parser("train", "Train a config in turns.")
    add_config_flags(parser)
    config = read_config(parser.parse(translate(argv)))
    with tempfile.TemporaryDirectory() as folder:
        device.configure(config.run.threads)
        run = open_bench_run(config, Path(folder), SilentConsole(), SingleProcess())
        run.warm_up(BenchPlan(warmup=2, run_steps=steps))

        train = timed(lambda: run.train(steps).samples)

        def measure() -> Turn:
            return {**train(), "multiply_adds": run.multiply_adds, "matmul_flops": measure_matmul()}

        serve(measure)


if __name__ == "__main__":
    main()
