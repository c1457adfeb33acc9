"""`convolve bench infer`, also called `infer-bench`."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convolve import device
from convolve.cli.flags import Parser, add_config_flags, given_values, read_config
from convolve.cli.output import print_json, print_table, size
from convolve.config.loading import flag_name
from convolve.config.spellings import translate
from convolve.errors import ConfigError

if TYPE_CHECKING:
    from convolve.app.bench_infer import InferSpeed, Subject
    from convolve.app.console import Console

DESCRIPTION = (
    "How fast a network answers: as it is, with folded norms, exported, in eight bits. Takes a run with its own test "
    "images, or any config with generated ones."
)
USAGE = "convolve bench infer [RUN | --config NAME | --model NAME] [--option value ...]"
HEADINGS = ("batch", "variant", "images/s", "mean ms", "p50 ms", "p99 ms", "p99.9 ms", "calls", "x eager")


def _parser() -> Parser:
    parser = Parser(prog="convolve bench infer", usage=USAGE, description=DESCRIPTION)
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


def run(arguments: Sequence[str]) -> int:
    """Measure, and print a table."""
    options = _parser().parse(translate(arguments))
    given = given_values(options)
    _check(options, set(given))
    device.prepare()
    from convolve.app import bench_infer
    from convolve.cli.console import PlainConsole, open_console

    console = PlainConsole() if options.json else open_console()
    sizes = options.batch_sizes or ([int(given["batch_size"])] if "batch_size" in given else bench_infer.BATCH_SIZES)
    speed = bench_infer.run(
        _open(options, console), console, variants=options.variants, batch_sizes=sizes, seconds=options.seconds
    )
    console.close()
    print_json(speed) if options.json else _show(speed)
    return 0


def _check(options: Namespace, given: set[str]) -> None:
    """A run brings its own options, and answers are computed in fp32 or in eight bits."""
    extra = sorted(given - {"threads", "batch_size"}) if options.run else sorted(given & {"precision", "device_model"})
    if extra and options.run:
        raise ConfigError(f"--{flag_name(extra[0])}: {options.run} was trained with its own; leave it out")
    if extra:
        raise ConfigError(
            f"--{flag_name(extra[0])}: bench infer measures fp32, and eight bits as --variants int8; leave it out"
        )


def _open(options: Namespace, console: "Console") -> "Subject":
    from convolve.app.bench_infer import from_config, from_run

    if options.run is None:
        return from_config(read_config(options), console)
    threads = given_values(options).get("threads")
    return from_run(options.run, None if threads is None else int(threads), console)


def _show(speed: "InferSpeed") -> None:
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
        f"at most {size(speed.peak_rss_bytes)} of memory; first calls are not counted"
    )
    for name, reason in speed.left_out.items():
        print(f"without {name}: {reason}")
