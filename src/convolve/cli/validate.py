"""`convolve validate`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser, add_engine_flag, add_loss_flag, add_metrics_flag
from convolve.cli.console import open_console, print_json, print_labels, print_result
from convolve.compat.programs import translate_program
from convolve.config.schema import SECTION_OF
from convolve.errors import ConfigError
from convolve.loggers.streams import print_line
from convolve.run_files import RECIPE_FILE

if TYPE_CHECKING:
    from convolve.runs.score import WeightsScore

EPILOG = "Score weights without a run: convolve validate --model NAME --weights NAME|FILE --data-dir FOLDER (--help)"


def run(argv: Sequence[str]) -> int:
    """Validate saved checkpoints, or with `--weights` published ones, on every test image."""
    if any(word.partition("=")[0] == "--weights" for word in argv):
        return score(argv)
    parser = Parser("validate", "Compute the test accuracy of saved checkpoints.", epilog=EPILOG)
    parser.add_argument(
        "path", type=Path, help="run folder (its newest checkpoint, or the best one of a run on photos) or checkpoint"
    )
    parser.add_argument("--all", action="store_true", help="validate every checkpoint of the run, in order")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="labeled folder to score [data of the run]")
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="samples per forward pass; does not change the result [chosen]"
    )
    add_loss_flag(parser)
    add_metrics_flag(parser)
    add_engine_flag(parser, "torch")
    options = parser.parse(translate_program("validate", argv))
    if options.batch_size is not None and options.batch_size < 1:
        raise ConfigError(f"--batch-size {options.batch_size}: must be at least 1")

    convolve.prepare()
    with open_console(options.json) as console:
        run = convolve.open(options.path, loss=options.loss)
        # The result of a run on photos is its best checkpoint, as in the last line of `train`.
        checkpoint = "best" if (options.path / RECIPE_FILE).is_file() else "newest"
        validate = run.validate_all if options.all else partial(run.validate, checkpoint=checkpoint)
        found = validate(
            options.data_dir,
            metrics=options.metric_names,
            batch_size=options.batch_size,
            engine=options.engine,
            progress=console,
        )
    records = found if isinstance(found, list) else [found]
    if options.json:
        print_json({"validations": records})
    elif records and records[-1].labels:
        print_labels(records[-1].labels)
    return 0


def score(argv: Sequence[str]) -> int:
    """Print the top-1 and top-5 accuracy of weights on a folder of labeled images."""
    summary = "Compute the accuracy of weights on a folder of labeled images, without training."
    parser = Parser("validate", summary, conflict_handler="resolve")
    for flag, kind, text in (
        ("--model", str, "model of the weights [that of published weights]"),
        ("--weights", str, "published weights by name, or a file"),
        ("--weights-dir", Path, "folder with published weight files [$CONVOLVE_WEIGHTS_DIR]"),
        ("--weights-mirror", str, "URL instead of the publisher's server [$CONVOLVE_WEIGHTS_MIRROR]"),
        ("--data-dir", Path, "folder with the images: its test or validation split, or all without splits"),
        ("--class-names", Path, "file with the name of each output [class folders in alphabetical order]"),
        ("--image-size", int, "side of the input in pixels [that of the weights]"),
        ("--normalization", str, "normalization of pixels [that of the weights]"),
        ("--batch-size", int, "samples per forward pass; does not change the result [chosen]"),
        ("--device", str, "device [auto]"),
        ("--threads", int, "CPU threads [all that the process may use]"),
    ):
        parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text)
    options = parser.parse(argv)

    convolve.prepare()
    given = {name: value for name, value in vars(options).items() if value is not None and name in SECTION_OF}
    with open_console(options.json) as console:
        result = convolve.validate(**given, class_names=options.class_names, progress=console)
    print_result(result, options.json, _print_score)
    return 0


def _print_score(result: "WeightsScore") -> None:
    print_line(
        f"{result.model} with weights {result.weights}: top-1 {result.top1:.2%}, top-5 {result.top5:.2%} of "
        f"{result.samples:,} images in {result.folder}, {result.seconds:.1f} s"
    )
