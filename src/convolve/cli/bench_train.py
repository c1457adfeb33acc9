"""`convolve bench train`."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from convolve import device
from convolve.cli.flags import DEFAULT_CONFIG, Parser, add_config_flags, given_values, read_config
from convolve.cli.output import print_json, print_table, size
from convolve.cli.processes import start_job, wants_job
from convolve.config import Config
from convolve.config.loading import field_name, resolve
from convolve.config.spellings import translate
from convolve.errors import ConfigError
from convolve.parallel.launch import follow_launcher
from convolve.parallel.topology import speaks

if TYPE_CHECKING:
    from convolve.app.bench_train import Comparison, TrainSpeed

DESCRIPTION = (
    "How fast a config trains: the real step, loop and input, without logs, validation and checkpoints. Takes every "
    "option of `convolve train`; --generated-data or --synthetic-data need no data."
)
USAGE = "convolve bench train [--config NAME] [--compare NAME] [--option value ...]"
TRACE = "trace.json"


def _parser() -> Parser:
    parser = Parser(prog="convolve bench train", usage=USAGE, description=DESCRIPTION)
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


def run(arguments: Sequence[str]) -> int:
    """Measure a config, or two in turns, and print what came out."""
    options = _parser().parse(translate(arguments, own=("profile",)))
    config, other = read_config(options), _read_other(options)
    _check(options, config, other)
    if wants_job(config):
        return start_job(["bench", "train", *arguments], config)

    follow_launcher()
    device.prepare()
    from convolve.app import bench_train
    from convolve.cli.console import PlainConsole, open_console

    console = PlainConsole() if options.json else open_console()
    pace = bench_train.Pace(options.warmup, options.repeats, options.run_steps)
    if other is not None:
        comparison = bench_train.compare(config, other, console, pace)
        console.close()
        _tell_comparison(comparison, options.json)
        return 0
    speed = bench_train.run(config, console, pace, Path(options.profile) if options.profile else None)
    console.close()
    if speaks():
        print_json(speed) if options.json else _show(speed)
    return 0


def _read_other(options: Namespace) -> Config | None:
    """The config to compare with: the options of the command line hold for both, --compare-with comes on top."""
    if options.compare is None and not options.compare_with:
        return None
    given = given_values(options)
    for word in options.compare_with:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--compare-with {word}: write OPTION=VALUE, as in batch-size=32")
        given[field_name(name)] = None if value == "none" else value.split(",") if "," in value else value
    chosen = options.compare or options.config or (None if "model" in given else DEFAULT_CONFIG)
    return resolve(chosen, Path(options.config_path) if options.config_path else None, given).config


def _check(options: Namespace, config: Config, other: Config | None) -> None:
    if other is None:
        return
    if max(config.parallel.processes, other.parallel.processes) > 1:
        raise ConfigError("--compare: variants take turns in one process; leave out --replicas and --shards")
    if options.profile:
        raise ConfigError("--profile: looks at one config alone; leave out --compare")
    if config.log.mlperf_logging:
        raise ConfigError("--mlperf-logging: is the log of one training; leave out --compare")


def _tell_comparison(comparison: "Comparison", as_json: bool) -> None:
    ratios = {"ratio": comparison.ratio, "ratio_least": comparison.ratio_least, "ratio_most": comparison.ratio_most}
    if as_json:
        print_json({**asdict(comparison.ours), **ratios, "other": comparison.other})
        return
    _show(comparison.ours)
    _show(comparison.other)
    print(
        f"the first is {comparison.ratio:.3f} times as fast as the second "
        f"({comparison.ratio_least:.3f} to {comparison.ratio_most:.3f} in runs side by side)"
    )


def _show(speed: "TrainSpeed") -> None:
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
        f"at most {size(speed.peak_rss_bytes)} of memory"
    )
    print(
        f"  {speed.flops / 1e9:,.1f} of {speed.matmul_flops / 1e9:,.1f} GFLOP/s of matrix products: "
        f"{speed.flop_share:.1%}; images/s of runs of {speed.run_steps} steps: {runs}; {counted}"
    )
    if speed.operators:
        rows = [(one.name, one.calls, f"{one.ms:.1f}", f"{one.share:.1%}") for one in speed.operators]
        print_table(("operator", "calls", "ms", "share"), rows)
