"""The config of any training run at a size that a test can afford; all reductions are defined here.

The bundled digits replace every dataset, and a small model of the same family replaces a large one. A run is two or
three steps of a few images, in one process and in fp32.

This replaces the following values of a config, so tests that use it do not compare them:
- dataset, hold-out, epochs and iterations, warm-up, curves and report, for every model (`SMALL`);
- batch size, accumulation and replicas, for every model;
- model and its size, pipeline stages and splits, recomputation, `bn_span`, `rts`, weight averages and checkpoint
  interval, for all models but LeNet (`SMALLER`, `ONE_PROCESS`);
- precision, device model, rounding, normalization and loss scaling, for all models but LeNet (`PLAIN`);
- the number of groups of a group norm, which becomes 4.
All other options stay as configured.
"""

from convolve.cli.command import Parser, add_config_flags, read_config
from convolve.compat.options import translate
from convolve.config.model_options import family_of

SMALL = {
    "dataset": "digits",
    "hold_out": 0,
    "epochs": None,
    "iterations": 3,
    "warmup_epochs": 0,
    "curves": False,
    "report": False,
}
SMALLER = {
    "resnet": "resnet11-cifar",
    "resnext": "resnext11-cifar",
    "efficientnet": "efficientnet-cifar",
    "mobilenet": "mobilenet-v3-small",
    "fastnet": "fastnet",
}
ONE_PROCESS = {
    "batch_size": 4,
    "gradient_accumulation_count": 1,
    "replicas": 1,
    "shards": 1,
    "pipeline_splits": ["auto"],
    "recompute_checkpoints": [],
    "bn_span": 1,
    "rts": False,
    "iterations": 2,
    "weight_avg_exp": [],
}
# Emulated 16-bit arithmetic is tested elsewhere; here it would only cost time.
PLAIN = {
    "precision": "32.32",
    "device_model": None,
    "enable_half_partials": False,
    "stochastic_rounding": False,
    "normalization": "unit",
    "loss_scaling_rule": "static",
    "initial_loss_scaling": None,
}


def reduce_size(config):
    """Return the options that make a config cheap enough to train in a test."""
    family = family_of(config.model.model)
    if family.family == "lenet":
        return {**SMALL, "batch_size": 32, "gradient_accumulation_count": 1, "replicas": 1}
    small = config.model.model if config.model.model.endswith("-cifar") else SMALLER[family.family]
    groups = {} if config.model.groups is None else {"groups": 4}
    return {**SMALL, **ONE_PROCESS, **PLAIN, **groups, "model": small, "model_size": None, "epochs_per_ckpt": None}


def as_flags(given):
    """Return options as command-line arguments."""
    words = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            items = (value or [""]) if isinstance(value, list) else ["none" if value is None else value]
            words += [f"--{flag}", *map(str, items)]
    return words


def without_data_dir(words):
    """The words without `--data-dir FOLDER`, under any of its names."""
    old = ("--data-dir", "--imagenet-data-path")
    return [word for word, before in zip(words, ["", *words], strict=False) if word not in old and before not in old]


def reduced(words):
    """A command of a page at the size of a test; the options of the page are resolved first."""
    command, *rest = words[1:]
    if command == "launch":
        return ["convolve", command, "--dry-run", *rest]
    if command not in ("train", "bench"):
        return ["convolve", command, *without_data_dir(rest)]
    part, rest = (rest[:1], rest[1:]) if command == "bench" else ([], rest)
    parser = Parser(command, "Reduced.")
    add_config_flags(parser)
    small = reduce_size(read_config(parser.parse(translate(rest))))
    if part == ["infer"]:
        small = {name: small[name] for name in ("dataset", "model", "model_size", "normalization")}
    quick = {
        "data": ["--images", "64"],
        "infer": ["--variants", "eager", "--batch-sizes", "4", "--seconds", "0.01"],
        "train": ["--warmup", "1", "--run-steps", "1", "--repeats", "2"],
    }
    less = [*as_flags(small), *quick.get("".join(part), [])]
    return ["convolve", command, *part, *without_data_dir(translate(rest)), *less]
