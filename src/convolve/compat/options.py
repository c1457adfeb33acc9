"""Option names of the systems that convolve replaces, and their names here.

The tables cover the digit examples of Paddle on IPU and of Ascend (TensorFlow 1 and 2), and Graphcore's applications in
TensorFlow and PyTorch. Underscores and dashes are interchangeable, so only names that differ otherwise are listed.
Options that depend on each other are in combinations.py, those of programs other than training in programs.py.
"""

import shlex
from collections.abc import Callable, Container, Sequence

from convolve.compat import familiar
from convolve.compat.applications import add_defaults
from convolve.compat.combinations import COMBINATIONS, parse_bool, split_options
from convolve.compat.refused import ONE_DEVICE, REFUSED
from convolve.errors import ConfigError

RENAMED = {
    "half-partial": "enable-half-partials",
    "enable-stochastic-rounding": "stochastic-rounding",
    "enable-fp-exceptions": "fp-exceptions",
    "force-weight-to-fp32": "force-fp32",
    "num-epochs": "epochs",
    "train-epochs": "epochs",
    "te": "epochs",
    "epoch": "epochs",
    "bs": "batch-size",
    "micro-batch-size": "batch-size",
    "data-path": "data-dir",
    "dd": "data-dir",
    "model-dir": "run-dir",
    "md": "run-dir",
    "logs-path": "run-dir",
    "save-dir": "log-dir",
    "epochs-between-evals": "validation-frequency",
    "ebe": "validation-frequency",
    "num-ipus": "shards",
    "num-gpus": "replicas",
    "ng": "replicas",
    "replication-factor": "replicas",
    "mul-rank-size": "replicas",
    "lr": "learning-rate",
    "abs-learning-rate": "learning-rate",
    "gradient-accumulation": "gradient-accumulation-count",
    "warmup-epoch": "warmup-epochs",
    "BN-decay": "bn-decay",
    "BN-span": "bn-span",
    "enable-recompute": "enable-recomputation",
    "norm-eps": "norm-epsilon",
    "norm-num-groups": "groups",
    "efficientnet-expand-ratio": "expand-ratio",
    "efficientnet-group-dim": "group-dim",
    "rmsprop-epsilon": "optimizer-epsilon",
    "optimizer-eps": "optimizer-epsilon",
    "lars-weight-decay": "weight-decay",
    "lars-skip-list": "weight-decay-exclude",
    "lr-decay": "learning-rate-decay",
    "weight-avg-N": "weight-avg-n",
    "dataloader-worker": "workers",
    "pipeline-num-parallel": "workers",
    "webdataset-percentage-to-use": "dataset-percentage-to-use",
    "imagenet-data-path": "data-dir",
    "fine-tune-first-trainable-layer": "freeze-until",
    "checkpoint-path": "run-dir",
    "checkpoint-output-dir": "run-dir",
    "checkpoint-save-freq": "epochs-per-ckpt",
    "weight-avg-exp-decay": "weight-avg-exp",
    "enable-optimizer-rts": "rts",
    "init-path": "weights",
}

REPLACED: dict[str, list[str]] = {
    "auto-loss-scaling": ["--loss-scaling-rule", "automatic"],
    "enable-ce": ["--seed", "90"],
    "no-validation": ["--validation-mode", "none"],
    "disable-metrics": ["--no-metrics"],
    "no-pipelining": ["--pipeline-schedule", "sequential"],
    "pipeline": [],
    "draw-ir-graph": ["--draw-graph"],
    "batch-norm": ["--norm-type", "batch"],
    "group-norm": ["--norm-type", "group"],
    "normalize-input": ["--normalization", "imagenet"],
    "eight-bit-io": ["--no-hostside-norm"],
    "no-eight-bit-io": ["--hostside-norm"],
}

_HOST_CALLS = "accepted without effect; steps are not grouped into device calls, and the result is the same"
# Options that are accepted although they change nothing; the line says why.
EXPLAINED = {
    "device-iterations": f"--device-iterations: {_HOST_CALLS}",
    "batches-per-step": f"--batches-per-step: {_HOST_CALLS}",
}

# Flags that took the words True or False: their value becomes a real switch.
WORDED = {"draw-loss-curve": "curves", "download": "download", "over-dump": "over-dump"}


def _use_ipu(value: str | None) -> list[str]:
    return ["--device-model", "ipu-mk2"] if parse_bool("use-ipu", value) else []


def _stochastic_rounding(value: str | None) -> list[str]:
    words = {"ON": True, "ON_PRNG_STABLE": True, "RI_PRNG_STABLE": True, "OFF": False}
    on = words[value.upper()] if value and value.upper() in words else parse_bool("stochastic-rounding", value)
    return ["--stochastic-rounding" if on else "--no-stochastic-rounding"]


def _distribution(value: str | None) -> list[str]:
    if (value or "").lower() in ("off", "one_device", "mirrored"):
        return []
    raise ConfigError(f"--distribution-strategy {value}: strategies are not selected by name; {ONE_DEVICE}")


def _batch_norm_momentum(value: str | None) -> list[str]:
    """Convert PyTorch's momentum, the weight of the new statistics, to a decay, the weight of the old ones."""
    try:
        return ["--bn-decay", f"{1 - float(value or ''):.12g}"]
    except ValueError:
        raise ConfigError(f"--batchnorm-momentum {value}: must be a number; it is 1 - bn-decay") from None


def _normalization_location(value: str | None) -> list[str]:
    flags = {"host": ["--hostside-norm"], "ipu": ["--no-hostside-norm"], "none": ["--normalization", "unit"]}
    if value not in flags:
        raise ConfigError(f"--normalization-location {value}: must be host, ipu or none")
    return flags[value]


def _loss_scale(value: str | None) -> list[str]:
    """Translate Ascend's value: 0 is its dynamic rule, 1 or more a constant factor."""
    return ["--loss-scaling-rule", "ascend"] if value in ("0", "0.0") else ["--loss-scaling", value or ""]


def _data(value: str | None) -> list[str]:
    """Translate data set names of Graphcore's PyTorch application, which include generated data."""
    generated = {"generated": ["--generated-data"], "synthetic": ["--synthetic-data"]}
    return generated.get(value or "", ["--dataset", value or ""])


def _recompute_mode(value: str | None) -> list[str]:
    if value not in ("none", "auto", "manual"):
        raise ConfigError(f"--recompute-mode {value}: must be none, auto or manual")
    return ["--no-enable-recomputation" if value == "none" else "--enable-recomputation"]


SPECIAL: dict[str, Callable[[str | None], list[str]]] = {
    "batchnorm-momentum": _batch_norm_momentum,
    "data": _data,
    "loss-scale-value": _loss_scale,
    "recompute-mode": _recompute_mode,
    "use-ipu": _use_ipu,
    "normalization-location": _normalization_location,
    "stochastic-rounding": _stochastic_rounding,
    "distribution-strategy": _distribution,
    "ds": _distribution,
}


class RejectedOptions(ConfigError):
    """Options that are not offered, each with its reason, and the command line without them."""

    def __init__(
        self, reasons: dict[str, str], arguments: Sequence[str], corrected: Sequence[str], by: str = ""
    ) -> None:
        self._arguments, self._corrected = list(arguments), list(corrected)
        if len(reasons) == 1:
            super().__init__("".join(f"{flag} is not offered{by}: {reason}" for flag, reason in reasons.items()))
        else:
            lines = "\n".join(f"  {flag}: {reason}" for flag, reason in reasons.items())
            super().__init__(f"{len(reasons)} options are not offered{by}", lines)

    def corrected_command(self, argv: Sequence[str]) -> str:
        """Return the command without the rejected options, given its words including them."""
        command = argv[: len(argv) - len(self._arguments)]
        return shlex.join(["convolve", *command, *self._corrected])


def translate(
    arguments: Sequence[str], reserved: Container[str] = (), notify: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Translate the options of other systems in a command line.

    Options that are not offered are reported together, each with its reason. Options in `reserved` belong to the
    command and are kept. `notify` receives a line about everything that is not obvious.
    """
    given = split_options(arguments)
    names = {**familiar.RENAMED, **RENAMED}
    refused = {**familiar.ANSWERED, **REFUSED}
    kept = [(name, words) for name, words in given if name in reserved]
    given = [(name, words) for name, words in given if name not in reserved]
    groups = [(names.get(name, name) if name else None, words) for name, words in given]
    rejected = {f"--{name}": refused[name] for name, _ in groups if name in refused}
    groups = [(name, words) for name, words in groups if f"--{name}" not in rejected]
    groups = add_defaults(groups, given, notify)
    for combine in COMBINATIONS:
        groups = combine(groups)
    for line in (EXPLAINED[name] for name, _ in groups if name in EXPLAINED):
        notify(line)
    result = [word for name, words in groups for word in _translate_group(name, words)]
    result += [word for name, words in kept for word in (f"--{name}", *words)]
    if rejected:
        raise RejectedOptions(rejected, arguments, result)
    return result


def _translate_group(name: str | None, words: list[str]) -> list[str]:
    if name is None:
        return words
    if name in EXPLAINED:
        return []
    replaced = {**familiar.REPLACED, **REPLACED}
    if name in replaced:
        return replaced[name] + words
    if name in SPECIAL:
        return SPECIAL[name](words[0] if words else None) + words[1:]
    if name in WORDED:
        on = parse_bool(name, words[0] if words else None)
        return [f"--{'' if on else 'no-'}{WORDED[name]}", *words[1:]]
    return [f"--{name}", *words]
