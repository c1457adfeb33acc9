"""Cost of saving and logging: fraction of the training time, at one checkpoint every 30 seconds.

    python benchmarks/saving_cost.py [--rounds 3] [--seconds 12] [--only lenet resnet20 resnet50]

A run trains for some seconds with its usual log points and one save. The time that its loop spends in logging and
saving is summed. Files are written in the background, so the CPU time of a complete save, measured alone and divided by
the number of threads, is added. The median over rounds counts. ResNet-50 is measured again with one thread on one core,
where files are written instead of training. Limit: 3.5 %. Exits with 1 if it is exceeded.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

from convolve import device

device.prepare()

import torch  # noqa: E402

from convolve.config.loading import resolve  # noqa: E402
from convolve.distributed.collectives import SingleProcess  # noqa: E402
from convolve.engine.callbacks import IntervalTrigger, LogCallback, SaveCallback, log_trigger  # noqa: E402
from convolve.engine.loop import Callback, StepEvent, fit, samples_after_steps  # noqa: E402
from convolve.loggers.base import SilentConsole  # noqa: E402
from convolve.runs.session import open_session  # noqa: E402
from turns import check_limit  # noqa: E402

EVERY_SECONDS, LIMIT_PERCENT = 30.0, 3.5
ONE_CORE_CASE = "resnet50"
CASES: dict[str, dict[str, object]] = {
    "lenet": {"model": "lenet-bn", "dataset": "mnist", "optimizer": "adam"},
    "resnet20": {"model": "resnet20-cifar", "dataset": "cifar-10", "optimizer": "momentum", "batch_size": 128},
    "resnet50": {
        "model": "resnet50",
        "dataset": "imagenet",
        "image_size": 64,
        "optimizer": "momentum",
        "batch_size": 8,
    },
}


class Timed:
    """Callback that measures wall and CPU seconds of another one."""

    timed = True

    def __init__(self, inner: Callback) -> None:
        self.inner = inner
        self.seconds = 0.0
        self.last_seconds = 0.0
        self.last_cpu_seconds = 0.0

    def on_step_end(self, event: StepEvent) -> None:
        start, cpu_start = time.perf_counter(), time.process_time()
        self.inner.on_step_end(event)
        took = time.perf_counter() - start
        if event.last:
            self.last_seconds, self.last_cpu_seconds = took, time.process_time() - cpu_start
        else:
            self.seconds += took


def measure(name: str, seconds: float) -> float:
    """Return the fraction of time spent in saving and logging, in percent."""
    options = {**CASES[name], "generated_data": True, "validation_mode": "none"}
    with tempfile.TemporaryDirectory() as folder:
        run = open_session(resolve(None, None, options).config, Path(folder), SilentConsole(), SingleProcess())
        config, state, parts, per_epoch = run.config, run.state, run.parts, len(run.loader)
        sizes = (config.optim.batch_size, config.global_batch_size)
        batches = run.loader.step_batches(config.run.seed, 0, *sizes)
        with run.outputs.open_loggers(SilentConsole()):
            fit(state, batches, parts, [], total=samples_after_steps(3, config, per_epoch))
            start = time.perf_counter()
            fit(state, batches, parts, [], total=samples_after_steps(6, config, per_epoch))
            steps = 6 + 2 * max(1, round(seconds * 3 / (time.perf_counter() - start) / 2))
            total, logger = samples_after_steps(steps, config, per_epoch), run.outputs.logger
            log = Timed(
                LogCallback(
                    trigger=log_trigger(config, per_epoch, total), parts=parts, loader=run.loader, logger=logger
                )
            )
            save = Timed(
                SaveCallback(
                    trigger=IntervalTrigger(Fraction(total * 2, 3), total),
                    parts=parts,
                    saver=run.outputs.open_saver(),
                    metadata={},
                    logger=logger,
                    select_by=config.run.select_by,
                )
            )
            start = time.perf_counter()
            fit(state, batches, parts, [log, save], total=total)
            took = time.perf_counter() - start - save.last_seconds
    per_save = save.seconds + save.last_cpu_seconds / torch.get_num_threads()
    percent = 100 * (log.seconds / took + per_save / EVERY_SECONDS)
    print(
        f"{name}: logging {1000 * log.seconds:.1f} ms in {took:.1f} s; a save blocks the loop for "
        f"{1000 * save.seconds:.0f} ms, and takes {1000 * save.last_seconds:.0f} ms in total, "
        f"{1000 * save.last_cpu_seconds:.0f} ms of CPU time",
        flush=True,
    )
    return percent


def run_on_one_core(options: argparse.Namespace) -> bool:
    """Measure a model in a process with one thread on the last core; return whether it is within the limit."""
    command = [sys.executable, __file__, "--only", ONE_CORE_CASE]
    command += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})  # the child inherits it
    try:
        return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0
    finally:
        os.sched_setaffinity(0, cores)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    options = parser.parse_args()
    alone = len(os.sched_getaffinity(0)) == 1
    layout = ", one thread on one core" if alone else ""
    passed = []
    for name in options.only:
        percents = [measure(name, options.seconds) for _ in range(options.rounds)]
        passed.append(check_limit(f"{name}{layout}", percents, LIMIT_PERCENT, "%"))
    if ONE_CORE_CASE in options.only and not alone:
        passed.append(run_on_one_core(options))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
