"""`convolve bench train`: training speed of a config, and the fraction of the machine's peak arithmetic that it uses.

Measures the step, loop, loader and numerics of a real run, without logs, validation and checkpoints. After a warm-up,
some steps are timed in each of several runs. The first run is reported but not counted. Two configs alternate run by
run, so load from other processes affects both alike.

A training step costs three forward passes (the gradients by weights and by activations cost one each), and a
multiply-add is two operations:

    flops         6 x multiply-adds of one sample x samples per second
    matmul_flops  2 n^3 / the shortest time of an n x n product in fp32, by the same threads, between the runs
    flop_share    flops / matmul_flops

Winograd convolutions count as direct ones, so the fraction measures useful work, not the load of the arithmetic units.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from convolve import device
from convolve.bench.timer import Operator, Times, peak_rss_bytes, profile, require_folder
from convolve.checkpoint.pretrained import adopt_weights, find_weights
from convolve.config import Config
from convolve.data.build import DataModule, name_dataset
from convolve.data.loader.loader import Loader, ReplicaShard
from convolve.distributed.collectives import Collectives, open_collectives, rank_zero_console, require_same_start
from convolve.distributed.partition import resolve_splits
from convolve.engine.build import (
    Numerics,
    build,
    build_initial_model,
    build_numerics,
    build_on_meta,
    open_data,
    run_span,
)
from convolve.engine.callbacks import evaluate_state, validation_record
from convolve.engine.data_choice import follow_data_and_model
from convolve.engine.loop import StepEvent, fit, samples_after_steps
from convolve.engine.state import TrainState
from convolve.engine.step import StepParts
from convolve.errors import ConfigError
from convolve.loggers.base import Console, LoggerGroup, RunInfo, ValidationRecord
from convolve.loggers.mlperf import MlperfLogger
from convolve.models import registry
from convolve.models.summary import summarize
from convolve.run_files import checkpoint_name, mlperf_name
from convolve.runs.folder import create_run_dir
from convolve.runs.results import run_info

RUN_SECONDS = 1.0
MATMUL_SIDE = 1024
MATMUL_SECONDS = 0.1
PROFILED_STEPS = 10


@dataclass(frozen=True)
class BenchPlan:
    """Amount of work to measure. By default, `run_steps` is chosen so a run takes about a second."""

    warmup: int = 5
    repeats: int = 5
    run_steps: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("warmup", self.warmup, 0), ("repeats", self.repeats, 1)):
            if value < least:
                raise ConfigError(f"--{name} {value}: must be {least} or more")
        if self.run_steps is not None and self.run_steps < 1:
            raise ConfigError(f"--run-steps {self.run_steps}: must be 1 or more")


@dataclass(frozen=True)
class TrainSpeed:
    """Training speed of one config. `runs` are the images/s of each run, including the uncounted first one."""

    config: str
    model: str
    dataset: str
    device: str
    threads: int
    processes: int
    precision: str
    execution: str
    batch_size: int
    global_batch_size: int
    run_steps: int
    steps: int
    first_excluded: bool
    images_per_second: float
    ms_per_step: float
    ms_p50: float
    ms_p99: float
    data_wait_share: float
    peak_rss_bytes: int
    multiply_adds: int
    flops: float
    matmul_flops: float
    flop_share: float
    runs: tuple[float, ...]
    operators: tuple[Operator, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Speeds of two configs, and median, minimum and maximum ratio of images/s over pairs of adjacent runs."""

    ours: TrainSpeed
    other: TrainSpeed
    ratio: float
    ratio_least: float
    ratio_most: float


@dataclass
class _StepTimer:
    """Callback that measures each step."""

    device: torch.device
    clock: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    started: float = 0.0
    timed: bool = True

    def start(self) -> None:
        self.seconds = []
        self.started = self.clock()

    def on_step_end(self, event: StepEvent) -> None:
        device.synchronize(self.device)
        now = self.clock()
        self.seconds.append(now - self.started)
        self.started = now


@dataclass(frozen=True)
class _Run:
    """Seconds of each step of one run, the samples in them, and the seconds spent waiting for data."""

    seconds: tuple[float, ...]
    samples: int
    waited: float

    @property
    def images_per_second(self) -> float:
        return self.samples / sum(self.seconds)


@dataclass(kw_only=True)
class BenchRun:
    """A run trained in pieces, and its measurements."""

    config: Config
    data: DataModule
    loader: Loader
    numerics: Numerics
    state: TrainState
    parts: StepParts
    info: RunInfo
    multiply_adds: int
    threads: int
    runs: list[_Run] = field(default_factory=list)
    matmul_flops: float = 0.0
    run_steps: int = 1
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        config, topology = self.config, self.parts.collectives.topology
        sizes = (config.optim.batch_size, config.global_batch_size)
        shard = ReplicaShard(topology.replica, topology.replicas, config.parallel.bn_span, topology.stage == 0)
        self._batches = self.loader.step_batches(config.run.seed, 0, *sizes, shard)
        self._timer = _StepTimer(self.data.device, self.clock)

    def train(self, steps: int) -> _Run:
        """Train for some steps."""
        state, loader = self.state, self.loader
        device.configure(self.threads)
        samples, waited = state.samples, loader.waited_seconds
        total = samples_after_steps(state.step + steps, self.config, len(loader))
        self._timer.start()
        fit(state, self._batches, self.parts, [self._timer], total=total)
        return _Run(tuple(self._timer.seconds), state.samples - samples, loader.waited_seconds - waited)

    def warm_up(self, plan: BenchPlan) -> None:
        """Run steps that are not counted, and choose the number of steps of a run, equal on all ranks."""
        seconds = (
            [*self.train(plan.warmup).seconds, *self.train(1).seconds] if plan.warmup else list(self.train(1).seconds)
        )
        steps = plan.run_steps or max(1, round(RUN_SECONDS / min(seconds)))
        self.run_steps = int(self.parts.collectives.broadcast_str(str(steps)))

    def measure(self) -> None:
        """Measure one run, and the matrix product rate of the machine right after it."""
        self.runs.append(self.train(self.run_steps))
        self.matmul_flops = max(self.matmul_flops, measure_matmul())

    def result(self, operators: Sequence[Operator] = ()) -> TrainSpeed:
        """Return the speed over all counted runs."""
        config = self.config
        counted = self.runs[1:] or self.runs
        seconds = [step for run in counted for step in run.seconds]
        times = Times(1000 * np.array(seconds), first_excluded=len(self.runs) > 1)
        rate = sum(run.samples for run in counted) / sum(seconds)
        matmul = self._sum_over_ranks(self.matmul_flops)
        return TrainSpeed(
            config=config.name,
            model=config.model.model,
            dataset=self.data.dataset.name,
            device=str(self.data.device),
            threads=self.threads,
            processes=config.parallel.processes,
            precision=self.numerics.choice.policy.name,
            execution=self.numerics.choice.execution,
            batch_size=config.optim.batch_size,
            global_batch_size=config.global_batch_size,
            run_steps=self.run_steps,
            steps=len(seconds),
            first_excluded=times.first_excluded,
            images_per_second=rate,
            ms_per_step=times.mean,
            ms_p50=times.quantile(0.5),
            ms_p99=times.quantile(0.99),
            data_wait_share=sum(run.waited for run in counted) / sum(seconds),
            peak_rss_bytes=int(self._sum_over_ranks(peak_rss_bytes())),
            multiply_adds=self.multiply_adds,
            flops=6 * self.multiply_adds * rate,
            matmul_flops=matmul,
            flop_share=6 * self.multiply_adds * rate / matmul,
            runs=tuple(run.images_per_second for run in self.runs),
            operators=tuple(operators),
        )

    def _sum_over_ranks(self, value: float) -> float:
        """Sum a value over all processes."""
        collectives = self.parts.collectives
        return float(
            collectives.sum_over_stages(collectives.sum_over_replicas(torch.tensor([value], dtype=torch.float64)))
        )


def measure_matmul() -> float:
    """Return the peak rate of fp32 matrix products by the threads of this process, in operations per second."""
    a, out = torch.rand(MATMUL_SIDE, MATMUL_SIDE), torch.empty(MATMUL_SIDE, MATMUL_SIDE)
    best, end = float("inf"), time.perf_counter() + MATMUL_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * MATMUL_SIDE**3 / best


def bench_train(config: Config, console: Console, plan: BenchPlan, trace: Path | None = None) -> TrainSpeed:
    """Measure one config; with `trace`, profile some more steps at the end."""
    if trace is not None:
        require_folder(trace)
    with ExitStack() as stack:
        run = _open(config, console, stack)
        writer = stack.enter_context(_open_log(run))
        writer.start(run.info)
        _take_turns([run], plan, console)
        if config.log.mlperf_logging:
            writer.valid(_validate(run))
        writer.event("end", status="success")
        operators = [] if trace is None else _profile(run, trace)
        return run.result(operators)


def compare(config: Config, other: Config, console: Console, plan: BenchPlan) -> Comparison:
    """Measure two configs in turns."""
    with ExitStack() as stack:
        runs = [_open(one, console, stack) for one in (config, other)]
        _take_turns(runs, plan, console)
        return compare_speeds(*(run.result() for run in runs))


def compare_speeds(ours: TrainSpeed, other: TrainSpeed) -> Comparison:
    """Return the speed ratio of two configs whose runs alternated."""
    pairs = list(zip(ours.runs, other.runs, strict=True))
    ratios = [mine / theirs for mine, theirs in pairs[1:] or pairs]
    return Comparison(ours, other, median(ratios), min(ratios), max(ratios))


def _open(config: Config, console: Console, stack: ExitStack) -> BenchRun:
    registry.check(config.model)
    resolve_splits(build_on_meta(config), config)
    device.configure(config.run.threads)
    collectives = stack.enter_context(open_collectives(config.parallel, device.select(config.run.device)))
    require_same_start(collectives, config)
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="convolve-")))
    return open_bench_run(config, folder, rank_zero_console(collectives, console), collectives)


def open_bench_run(config: Config, folder: Path, console: Console, collectives: Collectives) -> BenchRun:
    """Open the data of a config and build its state and step, as a run does; dumps go to the folder."""
    started = time.perf_counter()
    config = follow_data_and_model(adopt_weights(config, console))
    data = open_data(config, console)
    config = name_dataset(config, data.dataset.name)
    numerics = build_numerics(config, data.device, run_span(config, data), folder=folder, any_rank=collectives.any_rank)
    model = build_initial_model(config, data, console, weights=find_weights(config, console))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state, parts = build(config=config, data=data, collectives=collectives, numerics=numerics, model=model)
    whole = build_on_meta(config) if config.parallel.shards > 1 else state.model
    info = run_info(config, folder, data=data, numerics=numerics, parts=parts, parameters=parameters)
    return BenchRun(
        config=config,
        data=data,
        loader=data.train_loader(),
        numerics=numerics,
        state=state,
        parts=parts,
        info=replace(info, setup_seconds=time.perf_counter() - started),
        multiply_adds=summarize(config.model.model, whole).multiply_adds,
        threads=torch.get_num_threads(),
    )


def _open_log(run: BenchRun) -> LoggerGroup:
    """Open the MLPerf log in a run folder if it is enabled; a benchmark writes no other file."""
    config = run.config
    if not (config.log.mlperf_logging and run.parts.collectives.is_rank_zero):
        return LoggerGroup([])
    return LoggerGroup([MlperfLogger.open(create_run_dir(config.run, config.name) / mlperf_name(config.run.seed))])


def _validate(run: BenchRun) -> ValidationRecord:
    """Evaluate the model, since the MLPerf log requires an accuracy."""
    state, started = run.state, time.perf_counter()
    result = evaluate_state(state, run.parts, run.data.test_loader(), run.config)
    epoch, seconds = state.samples / len(run.loader), time.perf_counter() - started
    return validation_record(checkpoint_name(state.step), state.step, epoch, result, seconds)


def _take_turns(runs: Sequence[BenchRun], plan: BenchPlan, console: Console) -> None:
    for run in runs:
        run.warm_up(plan)
    for number in range(plan.repeats):
        console.progress("bench train", number, plan.repeats)
        for run in runs:
            run.measure()


def _profile(run: BenchRun, trace: Path) -> list[Operator]:
    """Profile some steps on rank 0; all other processes only run them."""
    steps = min(run.run_steps, PROFILED_STEPS)
    if not run.parts.collectives.is_rank_zero:
        run.train(steps)
        return []
    return profile(lambda: run.train(steps), trace)
