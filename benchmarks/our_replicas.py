"""Benchmark worker: convolve's own training with two replicas of one thread, in turns.

    python benchmarks/our_replicas.py default|gloo STEPS [options of `convolve bench train`]

`gloo` sends gradients as between hosts, instead of through shared memory. STEPS are those of a turn.
"""

import sys
import tempfile
from pathlib import Path

from convolve import device

device.prepare()

from convolve.bench.train import BenchPlan, open_bench_run  # noqa: E402
from convolve.cli.command import Parser, add_config_flags, read_config  # noqa: E402
from convolve.compat.options import translate  # noqa: E402
from convolve.distributed import shared_memory  # noqa: E402
from convolve.distributed.collectives import open_collectives  # noqa: E402
from convolve.loggers.base import SilentConsole  # noqa: E402
from pairs import open_pair, serve_pair  # noqa: E402
from turns import timed  # noqa: E402


def main() -> None:
    transport, steps, argv = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    rank = open_pair()
    if transport == "gloo":
        shared_memory.MAX_BYTES = 0
    parser = Parser("train", "Train a config in turns.")
    add_config_flags(parser)
    config = read_config(parser.parse(translate([*argv, "--replicas", "2", "--threads", "1"])))
    device.configure(config.run.threads)
    with tempfile.TemporaryDirectory() as folder, open_collectives(config.parallel) as collectives:
        run = open_bench_run(config, Path(folder), SilentConsole(), collectives)
        run.warm_up(BenchPlan(warmup=2, run_steps=steps))
        serve_pair(rank, timed(lambda: run.train(steps).samples), collectives.any_rank)


if __name__ == "__main__":
    main()
