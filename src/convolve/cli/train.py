"""`convolve train`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import convolve
from convolve.cli.command import (
    Parser,
    add_callbacks_flag,
    add_config_flags,
    add_loss_flag,
    explicit_options,
    model_in,
    read_config,
    should_spawn,
    spawn_ranks,
    translate_options,
)
from convolve.cli.console import finish_folds, open_console, run_training
from convolve.config.schema import Config
from convolve.distributed.launch.local import follow_launcher
from convolve.errors import ConfigError
from convolve.loggers.base import Console

USAGE = "convolve train [PHOTOS] [--option value ...]"
EPILOG = """examples:
  convolve train flowers                 photos in flowers/CLASS/
  convolve train flowers --minutes 10    the same, in ten minutes
  convolve train --model resnet50 --data-dir imagenet --epochs 90
  convolve train                         LeNet on MNIST

--model NAME --help also lists the options of that model.
--option none unsets an optional value."""


def read_options(argv: Sequence[str]) -> Namespace:
    """Parse the options of this command."""
    parser = Parser("train", "Train a model.", usage=USAGE, epilog=EPILOG)
    parser.add_argument("photos", nargs="?", type=Path, metavar="PHOTOS", help="folder of photos, one folder per class")
    add_loss_flag(parser)
    add_callbacks_flag(parser)
    add_config_flags(parser, model_in(argv), named_metrics=True)
    return parser.parse(translate_options(argv))


def photo_folder(options: Namespace) -> Path | None:
    """Return the folder to train on without a config: PHOTOS, or `--data-dir` alone."""
    given = explicit_options(options)
    folder: Path | None = options.photos
    if folder is not None:
        for option in ("data_dir", "dataset"):
            if option in given:
                raise ConfigError(
                    f"--{option.replace('_', '-')} {given[option]}: PHOTOS {folder} is the data; omit one"
                )
        return None if options.config else folder
    alone = "data_dir" in given and not options.config and not given.keys() & {"model", "dataset"}
    return Path(given["data_dir"]) if alone else None


def run(argv: Sequence[str]) -> int:
    """Train a config or on a folder of photos, and print the accuracy."""
    options = read_options(argv)
    folder = photo_folder(options)
    if folder is not None:
        code = _train_photos(folder, options)
        if code is not None:
            return code
    config = read_config(options, **({"data_dir": options.photos} if options.photos else {}))
    if should_spawn(config):
        return spawn_ranks(["train", *argv], config)

    follow_launcher()
    convolve.prepare()
    with open_console(options.json) as console:
        if config.is_cross_validation:
            return _cross_validate(config, options, console)
        return run_training(
            lambda: convolve.train(config=config, progress=console, **_read_code(options)), options.json
        )


def _read_code(options: Namespace) -> dict[str, Any]:
    """Return the names of code that is not part of a config."""
    return {"loss": options.loss, "metrics": options.metric_names, "callbacks": options.callbacks}


def _cross_validate(config: Config, options: Namespace, console: Console) -> int:
    """Train once for each fold; code that only a single run uses is rejected."""
    for option, given in _read_code(options).items():
        if given:
            name = given if isinstance(given, str) else given[0]
            raise ConfigError(f"--{option} {name}: is for one run; add --fold N or omit it")
    return finish_folds(convolve.cross_validate(config=config, progress=console), options.json)


def _train_photos(folder: Path, options: Namespace) -> int | None:
    """Train with the recipe for photos; return None if the folder contains a data set with a config, such as MNIST."""
    follow_launcher()
    convolve.prepare()
    from convolve.api.training import train_plan
    from convolve.recipes.photos import find_photos, plan_photos

    with open_console(options.json, photos=True) as console:
        given = explicit_options(options)
        photos = find_photos(folder, console, str(given.get("task", "auto")))
        if photos is None:
            return None
        plan = plan_photos(folder, photos, given, console)
        if plan.config.is_cross_validation:
            for line in plan.lines:
                console.info(line)
            return _cross_validate(plan.config, options, console)
        return run_training(lambda: train_plan(plan, progress=console, **_read_code(options)), options.json)
