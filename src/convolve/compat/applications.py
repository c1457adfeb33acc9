"""Defaults of Graphcore's two applications, which differ from ours.

Options in the spelling of the PyTorch application (`--half-partial`, `--gradient-accumulation`) bring its defaults for
its models, unless a named config is given. Config files of the TensorFlow application bring those of that application,
which depend on the model, the data set and the optimizer.
"""

from collections.abc import Callable, Mapping
from typing import Any

Groups = list[tuple[str | None, list[str]]]

# Spellings that only the PyTorch application has. `--lr` and `--epoch` are not here: people type them for other models.
TORCH_SPELLINGS = frozenset(
    (
        "batchnorm-momentum",
        "cutmix-lambda-low",
        "dataloader-worker",
        "device-iterations",
        "disable-metrics",
        "efficientnet-expand-ratio",
        "efficientnet-group-dim",
        "enable-fp-exceptions",
        "enable-stochastic-rounding",
        "gradient-accumulation",
        "half-partial",
        "imagenet-data-path",
        "lr-epoch-decay",
        "norm-eps",
        "norm-num-groups",
        "normalization-location",
        "optimizer-eps",
        "recompute-mode",
        "warmup-epoch",
        "webdataset-percentage-to-use",
        "weight-avg-exp-decay",
        "weight-avg-strategy",
    )
)

TORCH_DEFAULTS: Mapping[str, str | None] = {
    "batch-size": "1",
    "epochs": "10",
    "optimizer": "sgd",
    "momentum": "0",
    "learning-rate": "0.01",
    "rmsprop-decay": "0.99",
    "optimizer-epsilon": "1e-8",
    "weight-decay": "0.0001",
    "norm-type": "batch",
    "norm-epsilon": "1e-5",
    "normalization": "imagenet",
    "precision": "16.16",
    "no-stochastic-rounding": None,
    "loss-scaling": "1",
    "logs-per-epoch": "1",
    "validation-mode": "after",
}
_FAMILIES = ("resnet", "resnext", "efficientnet", "mobilenet")
# An option of the left makes the default on the right pointless or contradictory.
_REPLACES = {
    "base-learning-rate-exponent": "learning-rate",
    "iterations": "epochs",
    "rmsprop-base-decay-exp": "rmsprop-decay",
    "stochastic-rounding": "no-stochastic-rounding",
    "precision-mode": "precision",
}


def add_defaults(groups: Groups, given: Groups, notify: Callable[[str], None]) -> Groups:
    """Put the defaults of the PyTorch application before the options of one of its models if they are spelled as there.

    `groups` have our names, `given` those that were typed.
    """
    spelled = sorted({name for name, _ in given if name in TORCH_SPELLINGS})
    names = {name for name, _ in groups if name is not None}
    model = next((words[0] for name, words in groups if name == "model" and words), "")
    if not spelled or names & {"config", "help"} or not model.startswith(_FAMILIES):
        return groups
    taken = names | {_REPLACES[name] for name in names if name in _REPLACES}
    defaults = [(name, [] if value is None else [value]) for name, value in TORCH_DEFAULTS.items() if name not in taken]
    defaults += _dependent_defaults({name: words for name, words in groups if name is not None})
    shown = " ".join(" ".join((f"--{name}", *words)) for name, words in defaults)
    notify(f"--{spelled[0]} is an option of Graphcore's PyTorch application, so its defaults apply: {shown}")
    head, *rest = groups
    return [head, *((name, words) for name, words in defaults), *rest]


def _dependent_defaults(given: Mapping[str, list[str]]) -> list[tuple[str, list[str]]]:
    """Return the defaults of the PyTorch application that depend on other options."""
    names, defaults = set(given), list[tuple[str, list[str]]]()
    if given.get("norm-type") == ["group"]:
        defaults += [] if "groups" in names else [("groups", ["32"])]
    elif not names & {"bn-decay", "batchnorm-momentum"}:
        defaults.append(("bn-decay", ["0.9"]))
    if given.get("data") == ["imagenet"]:
        defaults += [] if "augment" in names else [("augment", ["resized-crop-flip"])]
    if not names & {"data", "dataset", "data-dir", "generated-data", "synthetic-data"}:
        defaults.append(("dataset", ["cifar10"]))
    if not names & {"normalization-location", "eight-bit-io", "hostside-norm", "no-hostside-norm"}:
        defaults.append(("hostside-norm", []))
    if "lr-schedule" not in names:
        defaults.append(("lr-schedule", ["step" if "lr-epoch-decay" in names else "constant"]))
    if "lr-epoch-decay" in names and "learning-rate-decay" not in names:
        defaults.append(("learning-rate-decay", ["0.5"]))
    if "pipeline-splits" in names and not names & {"enable-recomputation", "recompute-mode"}:
        defaults.append(("enable-recomputation", []))
    if given.get("model", [""])[0].startswith("mobilenet-v3") and "top-width" not in names:
        defaults.append(("top-width", ["1280"]))
    return defaults


_IMAGENET = {
    "augment": "resized-crop-flip",
    "crop_area": [0.05, 1.0],
    "crop_aspect": [0.75, 1.33],
    "normalization": "imagenet-mean",
    "epochs": 100,
    "norm_type": "group",
    "groups": 32,
    "norm_epsilon": 1e-5,
    "weight_decay": 1e-4,
    "weight_decay_on": "layers",
    "learning_rate_schedule": [0.3, 0.6, 0.8, 0.9],
}
_CIFAR = {
    "normalization": "standard",
    "batch_size": 32,
    "epochs": 160,
    "norm_type": "batch",
    "norm_epsilon": 1e-5,
    "weight_decay": 1e-6,
    "weight_decay_on": "all",
    "base_learning_rate_exponent": -6,
}
_EFFICIENTNET = {
    "norm_epsilon": 1e-3,
    "norm_type": "group",
    "groups": 4,
    "rmsprop_base_decay_exp": -14,
    "optimizer_epsilon": 1e-3,
}
_RATES = {"sgd": -8, "momentum": -11, "rmsprop-tf": -14}

TENSORFLOW_DEFAULTS: Mapping[str, Any] = {
    "model": "resnet",
    "precision": "16.16",
    "stochastic_rounding": True,
    "enable_half_partials": False,
    "loss_scaling": 128,
    "optimizer": "sgd",
    "momentum": 0.9,
    "lr_schedule": "stepped",
    "warmup_epochs": 5,
    "bn_decay": 0.97,
    "label_smoothing_over": "others",
    "validation_mode": "after",
}


def tensorflow_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the TensorFlow application for a config with these values, in our names."""
    given = {**TENSORFLOW_DEFAULTS, **values}
    family, imagenet = str(given["model"]), not str(given.get("dataset", "")).startswith("cifar")
    result = {**TENSORFLOW_DEFAULTS, **(_IMAGENET if imagenet else _CIFAR)}
    if imagenet:
        result["batch_size"] = 1 if family == "resnext" else 4
        result["base_learning_rate_exponent"] = _RATES.get(str(given["optimizer"]), -8)
    if family == "efficientnet":
        rate = {"sgd": -7, "momentum": -10}.get(str(given["optimizer"]), result["base_learning_rate_exponent"])
        result |= {**_EFFICIENTNET, "base_learning_rate_exponent": rate}
        result |= {"epochs": 350, "weight_decay": 1e-5, "label_smoothing": 0.1} if imagenet else {"epochs": 300}
    if given["optimizer"] == "lars":
        result["weight_decay_on"] = "matrices"
    result.pop("bn_decay" if given.get("norm_type", result["norm_type"]) == "group" else "groups", None)
    if given["lr_schedule"] != "stepped":
        result.pop("learning_rate_schedule", None)
    if not given.get("label_smoothing", result.get("label_smoothing")):
        result.pop("label_smoothing_over")
    return result
