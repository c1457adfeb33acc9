"""`convolve bench data`."""

from collections.abc import Sequence

from convolve import device
from convolve.cli.flags import Parser, add_config_flags, read_config
from convolve.cli.output import print_json
from convolve.config.spellings import translate


def run(arguments: Sequence[str]) -> int:
    """Measure the input of a training, without a network."""
    parser = Parser(prog="convolve bench data", description="How fast batches come, and whether a network would wait.")
    parser.add_argument("--images", type=int, default=2000, metavar="N", help="training samples to read [2000]")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    add_config_flags(parser)
    options = parser.parse(translate(arguments))
    config = read_config(options)
    device.prepare()
    from convolve.app import bench_data
    from convolve.cli.console import PlainConsole, open_console

    console = PlainConsole() if options.json else open_console()
    speed = bench_data.run(config, console, images=options.images)
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
