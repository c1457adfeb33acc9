"""The recorded configs of the original systems, in the options of convolve.

`fixtures/original-configs.csv` has the values, one row for each system, version, key and value, with the configs that
have it. `(default)` are the defaults of an application, `(resnet,imagenet)` those that depend on the model, the data
set or the optimizer. A key `base` continues another config. Rows of the system `convolve` record our own configs.

The translation below is written for this comparison only and does not use that of `convolve.compat`, so an error in one
of them shows.
"""

import csv
import json
from functools import cache
from pathlib import Path

from convolve.compat.options import EXPLAINED
from convolve.compat.refused import REFUSED
from convolve.config.model_options import family_of
from convolve.config.schema import Config, ModelConfig
from convolve.config.spelling import canonical
from documents import ROOT, tables

RECORDS = Path(__file__).parent / "fixtures" / "original-configs.csv"
DIFFERENCES = ROOT / "docs" / "recipes.md"
T, P, INFERENCE = "graphcore-tensorflow", "graphcore-pytorch", "graphcore-pytorch-inference"
# Blocks that other configs continue. They name no model, and without one the original trains its default.
PARTS = {"common", "efficientnet-g16-gn", "efficientnet-g16-gn-16ipu-mk2-base", "mobilenet-v3-base"}


def read_records():
    """Return {system: {config: {key: value}}}."""
    records = {}
    with RECORDS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for name in row["configs"].split():
                config = records.setdefault(row["system"], {}).setdefault(name, {})
                assert row["key"] not in config, f"{name}: {row['key']} is recorded twice"
                config[row["key"]] = json.loads(row["value"])
    return records


ALL = read_records()
ORIGINALS = {
    name: system
    for system, configs in ALL.items()
    for name in configs
    if not name.startswith("(") and name not in PARTS
}


def effective(system, name):
    """Return the values of a config with those that it inherits and the defaults of its application."""
    configs = ALL[system]
    own = dict(configs[name])
    while "base" in own:
        own = {**configs[own.pop("base")], **own}
    if system != T:
        return {**configs.get("(default)", {}), **own}
    given = {**configs["(default)"], **own}
    data = "imagenet" if given["dataset"] == "imagenet" else "cifar"
    about = (given["model"], data, given["optimiser"])
    levels = ["(default)", f"({data})", f"({about[0]},{data})", f"({','.join(about)})"]
    return {**{key: value for level in levels for key, value in configs.get(level, {}).items()}, **own}


def _next_block(split, model):
    if split.startswith("block"):
        return f"features/{split[5]}/{ord(split[6]) - ord('a')}"
    depths = {"resnet50": (3, 4, 6, 3), "resnext101-32x4d": (3, 4, 23, 3)}[model]
    stage, block = int(split[1]), int(split[3]) + 1
    return f"layer{stage}/{block}" if block < depths[stage - 1] else f"layer{stage + 1}/0"


REPEATS = {"efficientnet-b0": (1, 2, 2, 3, 3, 4, 1), "efficientnet-b4": (2, 4, 4, 6, 6, 8, 2)}


def _torch_block(split, model):
    """Return the block of a split of the PyTorch application: of timm, of MobileNet, or counted over all stages."""
    kind, *places = split.split("/")
    if kind == "blocks":
        return f"features/{int(places[0]) + 1}/{places[1]}"
    if kind == "mb_block":
        return f"features/{int(places[0]) + 1}"
    if kind == "_blocks":
        flat = [f"features/{stage + 1}/{block}" for stage, n in enumerate(REPEATS[model]) for block in range(n)]
        return flat[int(places[0])]
    if kind == "add":
        flat = [f"layer{stage + 1}/{block}" for stage, n in enumerate((3, 4, 6, 3)) for block in range(n)]
        return flat[int(places[0]) if places else 0]
    return split


def _tensorflow_model(given):
    size = given["model_size"]
    if given["model"] == "efficientnet":
        return f"efficientnet-b{size}"
    if given["model"] == "resnext":
        return f"resnext{size}-32x4d"
    return f"resnet{size}" if given["dataset"] == "imagenet" else f"resnet{size}-cifar"


def _norm(given, kind):
    if kind == "group":
        return {"norm_type": "group", "groups": given["groups"], "norm_epsilon": given["norm_epsilon"]}
    return {"norm_type": "batch", "norm_epsilon": given["norm_epsilon"], "bn_decay": given["bn_decay"]}


def _decaying(excluded):
    return {"": "all", "beta gamma bias": "matrices"}.get(" ".join(excluded), "layers")


def _tensorflow_rate(given):
    lars, efficientnet = given["optimiser"] == "LARS", given["model"] == "efficientnet"
    options = {
        "optimizer": {"RMSprop": "rmsprop-tf"}.get(given["optimiser"], given["optimiser"].lower()),
        "momentum": given["momentum"],
        "lr_schedule": {"polynomial_decay_lr": "polynomial"}.get(given["lr_schedule"], given["lr_schedule"]),
        "learning_rate_decay": given["learning_rate_decay"],
        "lr_decay_rate": given["lr_decay_rate"],
        "lr_drops": given["lr_drops"],
        "poly_lr_decay_power": given["poly_lr_decay_power"],
        "poly_lr_end_ratio": given["poly_lr_end_ratio"],
        "abs_end_learning_rate": given.get("abs_end_learning_rate"),
        "warmup_epochs": given["warmup_epochs"],
        "weight_decay": given["lars_weight_decay" if lars else "weight_decay"],
        "weight_decay_on": _decaying(given["lars_skip_list"] if lars else given["weight_decay_exclude"]),
        "lars_epsilon": given["lars_epsilon"],
        "lars_eeta": given["lars_eeta"],
        "label_smoothing": given["label_smoothing"],
        "label_smoothing_over": "others" if given["label_smoothing"] else "all",
    }
    if given["lr_schedule"] == "stepped":
        options["learning_rate_schedule"] = given["learning_rate_schedule"]
    if given.get("abs_learning_rate") is not None:
        options["learning_rate"] = given["abs_learning_rate"]
    else:
        options["base_learning_rate_exponent"] = given["base_learning_rate_exponent"]
    if efficientnet:
        options["rmsprop_base_decay_exp"] = given["rmsprop_base_decay_exp"]
        options["optimizer_epsilon"] = given["rmsprop_epsilon"]
    return options


def _tensorflow_layout(given, model):
    splits, options = given.get("pipeline_splits") or [], {}
    if given["shards"] > 1 and splits:
        options["pipeline_splits"] = [_next_block(split, model) for split in splits]
    elif splits:
        options["recompute_checkpoints"] = [f"layer{split[1]}/{split[3]}" for split in splits]
    return options | {
        "replicas": given["replicas"],
        "shards": given["shards"],
        "pipeline_schedule": given["pipeline_schedule"].lower(),
        "enable_recomputation": given["enable_recomputation"],
        "bn_span": given["BN_span"],
        "identical_replica_seeding": given["identical_replica_seeding"],
    }


def _tensorflow(given):
    model, imagenet = _tensorflow_model(given), given["dataset"] == "imagenet"
    plain = ("batch_size", "gradient_accumulation_count", "epochs", "precision", "stochastic_rounding", "fp_exceptions")
    same = ("loss_scaling", "mixup_alpha", "cutmix_lambda", "weight_avg_exp", "logs_per_epoch", "mlperf_logging")
    more = ("hostside_norm", "saturate_on_overflow", "enable_half_partials", "dataset_percentage_to_use", "dataset")
    sizes = ("convolution_groups", "group_dim", "expand_ratio", "block_survival_prob", "depth_divisor", "top_width")
    _ = given.get("eight_bit_io"), given.get("pipeline")  # Both are the only way here.
    mean = "imagenet" if given["normalise_input"] else "imagenet-mean"
    options = {key: given[key] for key in (*plain, *same, *more)} | {
        key: given[key] for key in sizes if given.get(key) is not None
    }
    options |= {
        "model": model,
        "cutmix_version": str(given["cutmix_version"]),
        "workers": given["pipeline_num_parallel"],
    }
    norm = {"norm_epsilon": given["norm_epsilon"], "groups": given["groups"], "bn_decay": given["BN_decay"]}
    options |= _norm(norm, "batch" if given.get("batch_norm") or not given.get("group_norm") else "group")
    options |= {"data_dir": given.get("data_dir")}
    options |= _tensorflow_rate(given) | _tensorflow_layout(given, model)
    options["validation_mode"] = "after" if given["validation"] else "none"
    options |= {"epochs_per_ckpt": given.get("epochs_per_ckpt"), "ckpts_per_epoch": given["ckpts_per_epoch"]}
    if imagenet:
        crop = {"crop_area": given["crop_area"], "crop_aspect": given["crop_aspect"]}
        return options | crop | {"augment": "resized-crop-flip", "normalization": mean}
    # Each image is standardized, then padded with zeros, which is its mean.
    return options | {"normalization": "each-image", "padding_mode": "mean"}


def _torch_rate(given):
    optimizer = {"sgd_combined": "sgd", "rmsprop_tf": "rmsprop-tf"}.get(given["optimizer"], given["optimizer"])
    options = {
        "optimizer": "momentum" if optimizer == "sgd" and given["momentum"] else optimizer,
        "momentum": given["momentum"],
        "learning_rate": given["lr"],
        "weight_decay": given["weight_decay"],
        "label_smoothing": given["label_smoothing"],
        "warmup_epochs": given["warmup_epoch"],
        "lr_schedule": {"step": "stepped" if given["lr_epoch_decay"] else "constant"}.get(
            given["lr_schedule"], given["lr_schedule"]
        ),
    }
    if optimizer.startswith("rmsprop"):
        options |= {"rmsprop_decay": given["rmsprop_decay"], "optimizer_epsilon": given["optimizer_eps"]}
    if given["lr_schedule"] == "exponential":
        options |= {"lr_decay_rate": given["lr_decay"], "lr_drops": given["epoch"] * given["lr_scheduler_freq"]}
    first = given.get("initial_loss_scaling", given["loss_scaling"])
    if first != given["loss_scaling"]:
        options |= {"loss_scaling_rule": "ramp", "initial_loss_scaling": first}
    return options | {"loss_scaling": given["loss_scaling"]}


def _torch_layout(given):
    splits = [_torch_block(split, given["model"]) for split in given["pipeline_splits"]]
    recomputes = given["recompute_mode"] != "none" or bool(splits) or given.get("enable_recompute", False)
    return {
        "replicas": given["replicas"],
        "shards": len(splits) + 1,
        **({"pipeline_splits": splits} if splits else {}),
        "enable_recomputation": recomputes,
        "recompute_checkpoints": [_torch_block(name, given["model"]) for name in given["recompute_checkpoints"]],
        "rts": given.get("enable_optimizer_rts", False),
    }


def _torch_model(given):
    decay = 1 - given.get("batchnorm_momentum", 0.1)
    norm = {"norm_epsilon": given.get("norm_eps", 1e-5), "groups": given.get("norm_num_groups"), "bn_decay": decay}
    options = {"model": given["model"], "normalization": "imagenet"} | _norm(norm, given["norm_type"])
    if given["model"].startswith("mobilenet"):
        options["top_width"] = 1280
    if given["model"].startswith("efficientnet"):
        options["expand_ratio"] = given.get("efficientnet_expand_ratio", 6)
        options["group_dim"] = given.get("efficientnet_group_dim", 1)
    return options


def _torch(given):
    averaged = given["weight_avg_strategy"] == "exponential"
    same = ("batch_size", "precision", "validation_mode", "logs_per_epoch", "mixup_alpha", "cutmix_disable_prob")
    options = {key: given[key] for key in (*same, "cutmix_lambda_low", "cutmix_lambda_high")}
    return (
        options
        | _torch_model(given)
        | _torch_rate(given)
        | _torch_layout(given)
        | {
            "dataset": given["data"],
            "augment": "resized-crop-flip",
            "crop_area": given["crop_area"],
            "gradient_accumulation_count": given["gradient_accumulation"],
            "epochs": given["epoch"],
            "seed": given.get("seed", 0),
            "enable_half_partials": given["half_partial"],
            "stochastic_rounding": given["enable_stochastic_rounding"],
            "fp_exceptions": given["enable_fp_exceptions"],
            "hostside_norm": given["normalization_location"] == "host" and not given["eight_bit_io"],
            "metrics": not given["disable_metrics"],
            "dataset_percentage_to_use": given["webdataset_percentage_to_use"],
            "weight_avg_exp": [given["weight_avg_exp_decay"]] if averaged else [],
        }
    )


def _inference(given):
    _ = given.get("random_weights")  # Speed is always measured with random weights.
    model = {key: value for key, value in _torch_model(given).items() if key != "bn_decay"}
    return model | {
        "batch_size": given["batch_size"],
        "valid_batch_size": given["batch_size"],
        "replicas": given["replicas"],
        "dataset": "imagenet",
        "precision": given["precision"],
        "enable_half_partials": given["half_partial"],
        "stochastic_rounding": False,
        "hostside_norm": (given["normalization_location"], given["eight_bit_io"]) == ("host", False),
    }


def _digits(given):
    schedule = given.get("schedule", "exponential")
    options = {"dataset": "mnist", "model": given["model"], "lr_schedule": schedule, "learning_rate": given["lr"]}
    options |= {"optimizer": given["optimizer"], "batch_size": given["batch_size"]}
    options["hold_out"] = 60000 - given["train_images"]
    options["normalization"] = "symmetric" if given["input_range"] == [-1, 1] else "unit"
    options["precision_mode"] = given.get("precision_mode")
    if schedule == "exponential":
        drops = given["steps"] / given["decay_steps"]
        options |= {"lr_decay_rate": given["decay_rate"], "lr_drops": drops, "lr_staircase": False}
    if given.get("epochs") is not None:
        return options | {"iterations": given["epochs"] * given["steps"]}
    return options | {"epochs": given.get("num_epochs", given.get("train_epochs"))}


TRANSLATIONS = {
    T: _tensorflow,
    P: _torch,
    INFERENCE: _inference,
    "paddle-ipu-mnist": _digits,
    "ascend-tf2-mnist": _digits,
    "ascend-tf1-lenet": _digits,
    "convolve": lambda given: {key: given[key] for key in given},
}
DEFAULTS = Config().values()


IMPLIED = {"normalization": "unit", "enable_half_partials": False, "saturate_on_overflow": False, "precision": "32.32"}


@cache
def expected(name):
    """Return all options that a recorded config must have here; what the original does not set has our default."""
    system = ORIGINALS[name]
    return {**DEFAULTS, **TRANSLATIONS[system](effective(system, name))}


def unread_keys(system):
    """Return the recorded keys of a system that no translation reads and that are not rejected here."""
    configs = [Watched(effective(system, name)) for name, own in ORIGINALS.items() if own == system]
    for given in configs:
        TRANSLATIONS[system](given)
    unread = set().union(*configs) - set().union(*(given.read for given in configs))
    return {key for key in unread if canonical(key.replace("_", "-")) not in {*REFUSED, *EXPLAINED}}


class Watched(dict):
    """A mapping that remembers which keys were read."""

    def __init__(self, values):
        super().__init__(values)
        self.read = set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)


def implied(option, values):
    """Return the effective value of an option that is not set."""
    if option == "stochastic_rounding":
        return values["precision"] == "16.16"
    family = family_of(values["model"])
    if family is None or option not in family.names():
        return IMPLIED.get(option)
    return getattr(family.read(ModelConfig(), small_images=values["model"].endswith("-cifar")), option)


def compare(name, values):
    """Return {option: (original, here)} for all options of a config that differ from the recorded ones."""
    pairs = {option: compare_option(name, option, values) for option in expected(name)}
    return {option: pair for option, pair in pairs.items() if pair is not None}


def compare_option(name, option, values):
    """Return the original and our value of an option as texts, or None if they are equal."""
    original = expected(name)[option]
    here = implied(option, values) if values[option] is None and original is not None else values[option]
    pair = (as_text(original), as_text(here))
    return None if pair[0] == pair[1] else pair


def as_text(value):
    """Return a value in one form: numbers by value, lists with spaces."""
    if isinstance(value, list | tuple):
        return " ".join(as_text(item) for item in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {True: "on", False: "off", None: ""}.get(value, str(value))
    return f"{value:.12g}"


@cache
def intended():
    """Return the rows of the table of differences: (pattern of the original name, option, original, here)."""
    rows = [
        row for header, lines in tables(DIFFERENCES) if header[:2] == ["original config", "option"] for row in lines
    ]
    return [tuple(cell.replace("`", "") for cell in row[:4]) for row in rows]
