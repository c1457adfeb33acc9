"""`convolve bench`: measure training, data loading or inference alone."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convolve import device
from convolve.cli.command import (
    Parser,
    add_config_flags,
    explicit_options,
    read_config,
    should_spawn,
    spawn_ranks,
    translate_options,
)
from convolve.cli.console import format_bytes, open_console, print_json, print_result, print_table
from convolve.config import Config
from convolve.config.loading import field_name, flag_name
from convolve.distributed.launch.local import follow_launcher
from convolve.distributed.topology import is_rank_zero
from convolve.errors import ConfigError, suggest

if TYPE_CHECKING:
    from convolve.bench.data import DataSpeed
    from convolve.bench.infer import BenchTarget, InferSpeed
    from convolve.bench.train import Comparison, TrainSpeed
    from convolve.loggers.base import Console

PARTS = {
    "train": "training: images/s, step times, and the fraction of the machine's FLOP/s",
    "data": "data loading alone, without a model",
    "infer": "inference: eager, with folded norms, exported, in 8 bits",
}
INFER_DESCRIPTION = (
    "Measure inference: eager, with folded norms, exported, in 8 bits. Takes a run with its test images, or any config "
    "with generated ones."
)
INFER_USAGE = "convolve bench infer [RUN | --config NAME | --model NAME] [--option value ...]"
INFER_HEADINGS = ("batch", "variant", "images/s", "mean ms", "p50 ms", "p99 ms", "p99.9 ms", "calls", "x eager")
TRAIN_DESCRIPTION = (
    "Measure training with the real step, loop and data loading, without logs, validation and checkpoints. Takes every "
    "option of `convolve train`; --generated-data or --synthetic-data need no data."
)
TRAIN_USAGE = "convolve bench train [--config NAME] [--compare NAME] [--option value ...]"
TRACE = "trace.json"


def run(argv: Sequence[str]) -> int:
    """Measure one part."""
    part = argv[0] if argv else "--help"
    if part in ("-h", "--help"):
        print("usage: convolve bench PART [options]     Run 'convolve bench PART --help' for details.\n")
        print("\n".join(f"  {name:<10} {summary}" for name, summary in PARTS.items()))
        raise SystemExit(0)
    if part not in PARTS:
        raise ConfigError(f"bench: unknown part '{part}'; {suggest(part, PARTS)}")
    return {"train": run_train, "data": run_data, "infer": run_infer}[part](argv[1:])


def run_data(argv: Sequence[str]) -> int:
    """Measure data loading without a model."""
    parser = Parser("bench data", "Measure data loading, and whether a model would wait for it.")
    parser.add_argument("--images", type=int, default=2000, metavar="N", help="training images to read [2000]")
    add_config_flags(parser)
    options = parser.parse(translate_options(argv))
    config = read_config(options)

    device.prepare()
    from convolve.bench import data

    with open_console(options.json) as console:
        speed = data.bench_data(config, console, images=options.images)
    print_result(speed, options.json, _print_data)
    return 0


def _print_data(speed: "DataSpeed") -> None:
    print(
        f"{speed.dataset} ({speed.origin}), {speed.image_size} px, batches of {speed.batch_size}, "
        f"{speed.workers} threads: {speed.images_per_second:,.0f} images/s, "
        f"{speed.images_per_second_per_core:,.0f} per core"
    )
    print(
        f"{speed.model} consumes {speed.model_images_per_second:,.0f} images/s, the loader delivers "
        f"{speed.images_per_second:,.0f}: training would {'' if speed.starved else 'not '}wait for data"
    )


def run_infer(argv: Sequence[str]) -> int:
    """Measure inference and print a table."""
    parser = Parser("bench infer", INFER_DESCRIPTION, usage=INFER_USAGE)
    parser.add_argument("run", nargs="?", type=Path, help="run folder or checkpoint [--config or --model]")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=(),
        metavar="NAME",
        help="eager folded onnx pt2 aoti int8 int8-openvino openvino auto [all that can be built]",
    )
    parser.add_argument("--engine", metavar="NAME", help="measure this engine, or the choice of auto, against eager")
    parser.add_argument("--batch-sizes", nargs="+", type=int, metavar="N", help="batch sizes to measure [1 8 64]")
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="X", help="seconds for each variant at each batch size [1]"
    )
    add_config_flags(parser)
    options = parser.parse(translate_options(argv))
    explicit = explicit_options(options)
    _check_infer(options, set(explicit))

    device.prepare()
    from convolve.bench import infer
    from convolve.inference.engines.factory import BATCH_SIZES

    sizes = options.batch_sizes or ([int(explicit["batch_size"])] if "batch_size" in explicit else BATCH_SIZES)
    with open_console(options.json) as console:
        target = _open_target(options, console)
        speed = infer.bench_infer(
            target, console, variants=_variants(options), batch_sizes=sizes, seconds=options.seconds
        )
    print_result(speed, options.json, _print_infer)
    return 0


def _variants(options: Namespace) -> Sequence[str]:
    """Return the variants to measure; `--engine` stands for two of them."""
    if options.engine is None:
        return tuple(options.variants)
    from convolve.inference.engines.base import check_name

    check_name(options.engine)
    if options.variants:
        raise ConfigError(f"--engine {options.engine} with --variants: use one of them")
    return "eager", options.engine


def _check_infer(options: Namespace, explicit: set[str]) -> None:
    """Reject options that a run already has, and number formats: inference is measured in fp32 and int8."""
    extra = explicit - {"threads", "batch_size"} if options.run else explicit & {"precision", "device_model"}
    if extra:
        reason = (
            f"already set by {options.run}"
            if options.run
            else "bench infer measures fp32, and 8 bits as --variants int8"
        )
        raise ConfigError(f"--{flag_name(min(extra))}: {reason}; omit it")


def _open_target(options: Namespace, console: "Console") -> "BenchTarget":
    from convolve.bench.infer import from_config, from_run

    if options.run is None:
        return from_config(read_config(options), console)
    threads = explicit_options(options).get("threads")
    return from_run(options.run, None if threads is None else int(threads), console)


def _print_infer(speed: "InferSpeed") -> None:
    rows = [
        (
            row.batch_size,
            row.variant,
            f"{row.images_per_second:,.0f}",
            f"{row.ms_mean:.3f}",
            f"{row.ms_p50:.3f}",
            f"{row.ms_p99:.3f}",
            f"{row.ms_p999:.3f}",
            row.repeats,
            "-" if row.ratio_to_eager is None else f"{row.ratio_to_eager:.2f}",
        )
        for row in speed.rows
    ]
    print_table(INFER_HEADINGS, rows)
    channels, height, width = speed.input_shape
    print(
        f"{speed.model}, {height} x {width} x {channels}, {speed.threads} threads, "
        f"at most {format_bytes(speed.peak_rss_bytes)} of memory; first calls are not counted"
    )
    for name, reason in speed.left_out.items():
        print(f"skipped {name}: {reason}")


def _parser_train() -> Parser:
    parser = Parser("bench train", TRAIN_DESCRIPTION, usage=TRAIN_USAGE)
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="steps before the first run [5]")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="timed runs; the first is shown but not counted [5]"
    )
    parser.add_argument("--run-steps", type=int, metavar="N", help="steps of a run [as many as take about a second]")
    parser.add_argument("--compare", metavar="NAME", help="second config, measured in turns with the first")
    parser.add_argument(
        "--compare-with",
        nargs="+",
        default=(),
        metavar="OPTION=VALUE",
        help="options of the second config, such as batch-size=32; without --compare it is otherwise the first config",
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        const=TRACE,
        metavar="FILE",
        help=f"write a Chrome trace and print the slowest operators [{TRACE}]",
    )
    add_config_flags(parser)
    return parser


def run_train(argv: Sequence[str]) -> int:
    """Measure a config, or two in turns, and print the speed."""
    options = _parser_train().parse(translate_options(argv, reserved=("profile",)))
    config, other = read_config(options), _read_other(options)
    _check_train(options, config, other)
    if should_spawn(config):
        return spawn_ranks(["bench", "train", *argv], config)

    follow_launcher()
    device.prepare()
    from convolve.bench import train

    plan = train.BenchPlan(options.warmup, options.repeats, options.run_steps)
    if other is not None:
        with open_console(options.json) as console:
            comparison = train.compare(config, other, console, plan)
        _print_comparison(comparison, options.json)
        return 0
    with open_console(options.json) as console:
        speed = train.bench_train(config, console, plan, Path(options.profile) if options.profile else None)
    if is_rank_zero():
        print_result(speed, options.json, _print_train)
    return 0


def _read_other(options: Namespace) -> Config | None:
    """Return the config to compare with: the options of the command line apply to both, then --compare-with."""
    if options.compare is None and not options.compare_with:
        return None
    overrides: dict[str, Any] = {}
    for pair in options.compare_with:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--compare-with {pair}: must be OPTION=VALUE, such as batch-size=32")
        overrides[field_name(name)] = None if value == "none" else value.split(",") if "," in value else value
    return read_config(options, options.compare, **overrides)


def _check_train(options: Namespace, config: Config, other: Config | None) -> None:
    if other is None:
        return
    if max(config.parallel.processes, other.parallel.processes) > 1:
        raise ConfigError("--compare: both configs run in one process; omit --replicas and --shards")
    if options.profile:
        raise ConfigError("--profile: profiles one config; omit --compare")
    if config.log.mlperf_logging:
        raise ConfigError("--mlperf-logging: logs one run; omit --compare")


def _print_comparison(comparison: "Comparison", as_json: bool) -> None:
    if as_json:
        ratios = {key: value for key, value in asdict(comparison).items() if key.startswith("ratio")}
        print_json({**asdict(comparison.ours), **ratios, "other": comparison.other})
        return
    _print_train(comparison.ours)
    _print_train(comparison.other)
    print(
        f"the first is {comparison.ratio:.3f} times as fast as the second "
        f"({comparison.ratio_least:.3f} to {comparison.ratio_most:.3f} in runs side by side)"
    )


def _print_train(speed: "TrainSpeed") -> None:
    runs = " ".join(f"{images_per_second:,.0f}" for images_per_second in speed.runs)
    counted = "the first is not counted" if speed.first_excluded else "the only one is counted"
    processes = f" x {speed.processes} processes" if speed.processes > 1 else ""
    print(
        f"{speed.config}: {speed.model} on {speed.dataset}, batch {speed.global_batch_size}, "
        f"{speed.precision} {speed.execution}, {speed.device}, {speed.threads} threads{processes}"
    )
    print(
        f"  {speed.images_per_second:,.1f} images/s, {speed.ms_per_step:.2f} ms/step "
        f"(p50 {speed.ms_p50:.2f}, p99 {speed.ms_p99:.2f}), waiting for data {speed.data_wait_share:.1%}, "
        f"at most {format_bytes(speed.peak_rss_bytes)} of memory"
    )
    print(
        f"  {speed.flops / 1e9:,.1f} of {speed.matmul_flops / 1e9:,.1f} GFLOP/s of matrix products: "
        f"{speed.flop_share:.1%}; images/s of runs of {speed.run_steps} steps: {runs}; {counted}"
    )
    if speed.operators:
        rows = [(one.name, one.calls, f"{one.ms:.1f}", f"{one.share:.1%}") for one in speed.operators]
        print_table(("operator", "calls", "ms", "fraction"), rows)
