"""`convolve bench`: finds the part that is to be measured.

`convolve bench data`.

`convolve bench infer`, also called `infer-bench`.

`convolve bench train`.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from convolve import device
from convolve.cli.command import (
    DEFAULT_CONFIG,
    Parser,
    add_config_flags,
    explicit_options,
    read_config,
    should_spawn,
    spawn_ranks,
)
from convolve.cli.console import format_bytes, print_json, print_table
from convolve.compat.options import translate
from convolve.config import Config
from convolve.config.loading import field_name, flag_name, resolve
from convolve.distributed.launch.local import follow_launcher
from convolve.distributed.topology import is_rank_zero
from convolve.errors import ConfigError, suggest

PARTS = {
    "train": "training: images/s, step times, and the share of the machine's arithmetic",
    "data": "the input alone, without a network",
    "infer": "answers of a network: as it is, with folded norms, exported, in eight bits",
}


def run(arguments: Sequence[str]) -> int:
    """Measure one part alone."""
    part = arguments[0] if arguments else "--help"
    if part in ("-h", "--help"):
        print("usage: convolve bench PART [options]     convolve bench PART --help tells more\n")
        print("\n".join(f"  {name:<10} {what}" for name, what in PARTS.items()))
        raise SystemExit(0)
    if part not in PARTS:
        raise ConfigError(f"bench {part}: no such part; {suggest(part, PARTS)}")
    return {"train": run_train, "data": run_data, "infer": run_infer}[part](arguments[1:])


def run_data(arguments: Sequence[str]) -> int:
    """Measure the input of a training, without a network."""
    parser = Parser(prog="convolve bench data", description="How fast batches come, and whether a network would wait.")
    parser.add_argument("--images", type=int, default=2000, metavar="N", help="training samples to read [2000]")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    add_config_flags(parser)
    options = parser.parse(translate(arguments))
    config = read_config(options)
    device.prepare()
    from convolve.bench import data
    from convolve.cli.console import PlainConsole, open_console

    console = PlainConsole() if options.json else open_console()
    speed = data.bench_data(config, console, images=options.images)
    console.close()
    if options.json:
        print_json(speed)
        return 0
    print(
        f"{speed.dataset} ({speed.origin}), {speed.image_size} px, batches of {speed.batch_size}, "
        f"{speed.workers} threads: {speed.images_per_second:,.0f} images/s, "
        f"{speed.images_per_second_per_core:,.0f} per core"
    )
    verdict = "training would wait for data" if speed.starved else "training would not wait for data"
    print(
        f"{speed.model} consumes {speed.model_images_per_second:,.0f} images/s, the loader delivers "
        f"{speed.images_per_second:,.0f}: {verdict}"
    )
    return 0


if TYPE_CHECKING:
    from convolve.bench.infer import BenchTarget, InferSpeed
    from convolve.loggers.base import Console


INFER_DESCRIPTION = (
    "How fast a network answers: as it is, with folded norms, exported, in eight bits. Takes a run with its own test "
    "images, or any config with generated ones."
)

INFER_USAGE = "convolve bench infer [RUN | --config NAME | --model NAME] [--option value ...]"
HEADINGS = ("batch", "variant", "images/s", "mean ms", "p50 ms", "p99 ms", "p99.9 ms", "calls", "x eager")


def _parser_infer() -> Parser:
    parser = Parser(prog="convolve bench infer", usage=INFER_USAGE, description=INFER_DESCRIPTION)
    parser.add_argument("run", nargs="?", type=Path, help="run folder or checkpoint; unset: --config or --model")
    parser.add_argument(
        "--variants", nargs="+", default=(), metavar="NAME", help="eager folded onnx pt2 aoti int8 [all that can be]"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, metavar="N", help="sizes to measure [1 8 64]")
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="X", help="time for each variant at each batch size [1]"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    add_config_flags(parser)
    return parser


def run_infer(arguments: Sequence[str]) -> int:
    """Measure, and print a table."""
    options = _parser_infer().parse(translate(arguments))
    given = explicit_options(options)
    _check_infer(options, set(given))
    device.prepare()
    from convolve.bench import infer
    from convolve.cli.console import PlainConsole, open_console

    console = PlainConsole() if options.json else open_console()
    sizes = options.batch_sizes or ([int(given["batch_size"])] if "batch_size" in given else infer.BATCH_SIZES)
    speed = infer.bench_infer(
        _open(options, console), console, variants=options.variants, batch_sizes=sizes, seconds=options.seconds
    )
    console.close()
    print_json(speed) if options.json else _show_infer(speed)
    return 0


def _check_infer(options: Namespace, given: set[str]) -> None:
    """A run brings its own options, and answers are computed in fp32 or in eight bits."""
    extra = sorted(given - {"threads", "batch_size"}) if options.run else sorted(given & {"precision", "device_model"})
    if extra and options.run:
        raise ConfigError(f"--{flag_name(extra[0])}: {options.run} was trained with its own; leave it out")
    if extra:
        raise ConfigError(
            f"--{flag_name(extra[0])}: bench infer measures fp32, and eight bits as --variants int8; leave it out"
        )


def _open(options: Namespace, console: "Console") -> "BenchTarget":
    from convolve.bench.infer import from_config, from_run

    if options.run is None:
        return from_config(read_config(options), console)
    threads = explicit_options(options).get("threads")
    return from_run(options.run, None if threads is None else int(threads), console)


def _show_infer(speed: "InferSpeed") -> None:
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
    print_table(HEADINGS, rows)
    channels, height, width = speed.input_shape
    print(
        f"{speed.model}, {height} x {width} x {channels}, {speed.threads} threads, "
        f"at most {format_bytes(speed.peak_rss_bytes)} of memory; first calls are not counted"
    )
    for name, reason in speed.left_out.items():
        print(f"without {name}: {reason}")


if TYPE_CHECKING:
    from convolve.bench.train import Comparison, TrainSpeed


TRAIN_DESCRIPTION = (
    "How fast a config trains: the real step, loop and input, without logs, validation and checkpoints. Takes every "
    "option of `convolve train`; --generated-data or --synthetic-data need no data."
)

TRAIN_USAGE = "convolve bench train [--config NAME] [--compare NAME] [--option value ...]"
TRACE = "trace.json"


def _parser_train() -> Parser:
    parser = Parser(prog="convolve bench train", usage=TRAIN_USAGE, description=TRAIN_DESCRIPTION)
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="steps before the first run [5]")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="runs; the first is told and does not count [5]"
    )
    parser.add_argument("--run-steps", type=int, metavar="N", help="steps of a run; unset: what takes about a second")
    parser.add_argument("--compare", metavar="NAME", help="another config, which takes turns with the first")
    parser.add_argument(
        "--compare-with",
        nargs="+",
        default=(),
        metavar="OPTION=VALUE",
        help="what the other has besides, as in batch-size=32; without --compare it is the same config otherwise",
    )
    parser.add_argument(
        "--profile", nargs="?", const=TRACE, metavar="FILE", help=f"write a chrome trace, show top operators [{TRACE}]"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    add_config_flags(parser)
    return parser


def run_train(arguments: Sequence[str]) -> int:
    """Measure a config, or two in turns, and print what came out."""
    options = _parser_train().parse(translate(arguments, own=("profile",)))
    config, other = read_config(options), _read_other(options)
    _check_train(options, config, other)
    if should_spawn(config):
        return spawn_ranks(["bench", "train", *arguments], config)

    follow_launcher()
    device.prepare()
    from convolve.bench import train
    from convolve.cli.console import PlainConsole, open_console

    console = PlainConsole() if options.json else open_console()
    pace = train.StepRate(options.warmup, options.repeats, options.run_steps)
    if other is not None:
        comparison = train.compare(config, other, console, pace)
        console.close()
        _show_comparison(comparison, options.json)
        return 0
    speed = train.bench_train(config, console, pace, Path(options.profile) if options.profile else None)
    console.close()
    if is_rank_zero():
        print_json(speed) if options.json else _show_train(speed)
    return 0


def _read_other(options: Namespace) -> Config | None:
    """The config to compare with: the options of the command line hold for both, --compare-with comes on top."""
    if options.compare is None and not options.compare_with:
        return None
    given = explicit_options(options)
    for word in options.compare_with:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--compare-with {word}: write OPTION=VALUE, as in batch-size=32")
        given[field_name(name)] = None if value == "none" else value.split(",") if "," in value else value
    chosen = options.compare or options.config or (None if "model" in given else DEFAULT_CONFIG)
    return resolve(chosen, Path(options.config_path) if options.config_path else None, given).config


def _check_train(options: Namespace, config: Config, other: Config | None) -> None:
    if other is None:
        return
    if max(config.parallel.processes, other.parallel.processes) > 1:
        raise ConfigError("--compare: variants take turns in one process; leave out --replicas and --shards")
    if options.profile:
        raise ConfigError("--profile: looks at one config alone; leave out --compare")
    if config.log.mlperf_logging:
        raise ConfigError("--mlperf-logging: is the log of one training; leave out --compare")


def _show_comparison(comparison: "Comparison", as_json: bool) -> None:
    ratios = {"ratio": comparison.ratio, "ratio_least": comparison.ratio_least, "ratio_most": comparison.ratio_most}
    if as_json:
        print_json({**asdict(comparison.ours), **ratios, "other": comparison.other})
        return
    _show_train(comparison.ours)
    _show_train(comparison.other)
    print(
        f"the first is {comparison.ratio:.3f} times as fast as the second "
        f"({comparison.ratio_least:.3f} to {comparison.ratio_most:.3f} in runs side by side)"
    )


def _show_train(speed: "TrainSpeed") -> None:
    runs = " ".join(f"{run:,.0f}" for run in speed.runs)
    counted = "the first does not count" if speed.first_excluded else "the only one counts"
    several = f" x {speed.processes} processes" if speed.processes > 1 else ""
    print(
        f"{speed.config}: {speed.model} on {speed.dataset}, batch {speed.global_batch_size}, "
        f"{speed.precision} {speed.execution}, {speed.device}, {speed.threads} threads{several}"
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
        print_table(("operator", "calls", "ms", "share"), rows)
