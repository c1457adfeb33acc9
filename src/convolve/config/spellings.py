"""Option names of the systems that convolve replaces: what each is called here, or why it is not offered.

The tables hold the digit examples of Paddle on IPU and of Ascend (TensorFlow 1 and 2). Underscores and dashes are the
same everywhere, so only names that differ otherwise are listed.
"""

from collections.abc import Callable, Sequence

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
    "num-ipus": "replicas",
    "num-gpus": "replicas",
    "ng": "replicas",
    "replication-factor": "replicas",
    "mul-rank-size": "replicas",
    "optimizer": "optimiser",
    "lr": "learning-rate",
    "abs-learning-rate": "learning-rate",
    "gradient-accumulation": "gradient-accumulation-count",
    "warmup-epoch": "warmup-epochs",
    "BN-decay": "bn-decay",
    "norm-eps": "norm-epsilon",
    "norm-num-groups": "groups",
    "efficientnet-expand-ratio": "expand-ratio",
    "efficientnet-group-dim": "group-dim",
    "rmsprop-epsilon": "optimiser-epsilon",
    "optimizer-eps": "optimiser-epsilon",
    "lars-weight-decay": "weight-decay",
    "lars-skip-list": "weight-decay-exclude",
    "lr-decay": "learning-rate-decay",
    "weight-avg-N": "weight-avg-n",
    "dataloader-worker": "workers",
    "pipeline-num-parallel": "workers",
    "webdataset-percentage-to-use": "dataset-percentage-to-use",
    "imagenet-data-path": "data-dir",
    "fine-tune-first-trainable-layer": "freeze-until",
}

REPLACED: dict[str, list[str]] = {
    "auto-loss-scaling": ["--loss-scaling-rule", "automatic"],
    "enable-ce": ["--seed", "90"],
    "no-validation": ["--validation-mode", "none"],
    "disable-metrics": ["--no-metrics"],
    "no-pipelining": ["--shards", "1"],
    "draw-ir-graph": ["--draw-graph"],
    "batch-norm": ["--norm-type", "batch"],
    "group-norm": ["--norm-type", "group"],
    "normalise-input": ["--normalisation", "imagenet"],
    "eight-bit-io": ["--no-hostside-norm"],
    "no-eight-bit-io": ["--hostside-norm"],
}

# Flags that took the words True or False: their value becomes a real switch.
WORDED = {"draw-loss-curve": "curves", "download": "download", "over-dump": "over-dump"}

# Flags that only said whether another option counts: that option, and the value that it had by itself.
SWITCHES = {"data-dump-flag": ("data-dump-step", "10"), "use-mixlist": ("mixlist-file", "ops_info.json")}

_ONE_DEVICE = "the number of copies is --replicas N here, on whatever devices there are"
REFUSED = {
    "hostside-image-mixing": "images are mixed where the batch is, with the same result; leave it out",
    "standard-imagenet": "there is one input pipeline here, and it is repeatable with any number of threads",
    "data-dump-path": "dumps go into the run folder; leave it out",
    "over-dump-path": "dumps go into the run folder; leave it out",
    "use-data-parallel": f"it never worked in the original; {_ONE_DEVICE}",
    "learing-rata": "it was misspelt and never read; write --learning-rate",
    "ues-ipu-model": "it was misspelt; the saved model here takes any batch size, nothing has to be rewritten",
    "random-remove": "it was never read by the original and means nothing here",
    "ckpt-count": "it was never read by the original; --keep-checkpoints N keeps the newest N",
    "iteration-per-loop": "steps are not grouped into device calls here; leave it out",
    "eval-static": "shapes are always known and every test image is counted; leave it out",
    "clean": "a run folder is never deleted by training; every run gets a new one, or name it with --run-dir",
    "profiler-port": "no profiling server is started; leave it out",
    "mul-device-id": "devices are numbered by themselves; --device cuda:1 names one",
    "tpu": f"no TPU is driven from here; {_ONE_DEVICE}",
    "tpu-zone": f"no TPU is driven from here; {_ONE_DEVICE}",
    "tpu-gcp-project": f"no TPU is driven from here; {_ONE_DEVICE}",
    "num-tpu-shards": f"no TPU is driven from here; {_ONE_DEVICE}",
    "worker-hosts": "hosts are given to torchrun; leave it out",
    "task-index": "ranks are given by torchrun; leave it out",
    "fusion-off-flag": "operator fusion of the vendor's compiler has no counterpart here; leave it out",
    "fusion-off-file": "operator fusion of the vendor's compiler has no counterpart here; leave it out",
    "lr-epoch-decay": "drops are shares of the run here, so that they move with its length: --learning-rate-schedule",
    "lr-scheduler-freq": "the rate follows its curve at every step; exponential drops are counted by --lr-drops",
    "loss-velocity-scaling-ratio": "momentum and accumulator are never stored as one here; leave it out",
    "enable-fast-groupnorm": "there is one group norm, whose checkpoints fit everywhere; leave it out",
    "no-proxy-recompute": "the proxy's moments are always computed anew, they cost next to nothing; leave it out",
    "autotune": "the vendor's kernel tuning has no counterpart here; leave it out",
}

Options = dict[str, str | None]


def _truth(name: str, value: str | None) -> bool:
    words = {None: True, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    key = None if value is None else value.lower()
    if key not in words:
        raise ConfigError(f"{name}={value}: write True or False")
    return words[key]


def _use_ipu(value: str | None) -> list[str]:
    return ["--device-model", "ipu-mk2"] if _truth("use-ipu", value) else []


def _stochastic_rounding(value: str | None) -> list[str]:
    if value is not None and value.upper() not in ("ON", "OFF", "ON_PRNG_STABLE", "RI_PRNG_STABLE"):
        raise ConfigError(f"stochastic-rounding={value}: write --stochastic-rounding or --no-stochastic-rounding")
    return ["--no-stochastic-rounding" if (value or "").upper() == "OFF" else "--stochastic-rounding"]


def _distribution(value: str | None) -> list[str]:
    if (value or "").lower() in ("off", "one_device", "mirrored"):
        return []
    raise ConfigError(f"distribution-strategy={value}: strategies are not chosen by name here; {_ONE_DEVICE}")


def _batch_norm_momentum(value: str | None) -> list[str]:
    """PyTorch's momentum is the share of the new statistics, a decay the share of the old ones."""
    try:
        return ["--bn-decay", f"{1 - float(value or ''):.12g}"]
    except ValueError:
        raise ConfigError(f"batchnorm-momentum={value}: must be a number; it is 1 - bn-decay") from None


def _normalisation_place(value: str | None) -> list[str]:
    places = {"host": ["--hostside-norm"], "ipu": ["--no-hostside-norm"], "none": ["--normalisation", "unit"]}
    if value not in places:
        raise ConfigError(f"normalization-location={value}: must be host, ipu or none")
    return places[value]


SPECIAL: dict[str, Callable[[str | None], list[str]]] = {
    "batchnorm-momentum": _batch_norm_momentum,
    "use-ipu": _use_ipu,
    "normalization-location": _normalisation_place,
    "stochastic-rounding": _stochastic_rounding,
    "distribution-strategy": _distribution,
    "ds": _distribution,
}


def _split(arguments: Sequence[str]) -> list[tuple[str | None, list[str]]]:
    """Options with the words that follow them; words before the first option stand under None."""
    groups: list[tuple[str | None, list[str]]] = [(None, [])]
    for position, word in enumerate(arguments):
        if word == "--":
            groups[-1][1].extend(arguments[position:])
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            groups.append((name.replace("_", "-"), [value] if equals else []))
        else:
            groups[-1][1].append(word)
    return groups


def _steps_to_iterations(groups: list[tuple[str | None, list[str]]]) -> list[tuple[str | None, list[str]]]:
    """`--steps S --epochs E` (steps in each epoch) becomes `--iterations S*E`; 0 steps meant a whole pass."""
    words = {name: words for name, words in groups if name in ("steps", "epochs")}
    if "steps" not in words:
        return groups
    kept = [(name, group) for name, group in groups if name != "steps"]
    if words["steps"][:1] == ["0"]:
        return kept
    try:
        total = int(words["steps"][0]) * int(words.get("epochs", ["1"])[0])
    except (ValueError, IndexError):
        raise ConfigError(
            f"steps={' '.join(words['steps'])}: steps per epoch is a whole number; 0 means a whole pass"
        ) from None
    return [(name, group) for name, group in kept if name != "epochs"] + [("iterations", [str(total)])]


def _sgd_with_momentum(groups: list[tuple[str | None, list[str]]]) -> list[tuple[str | None, list[str]]]:
    """In PyTorch `sgd` takes a momentum; here that rule is called `momentum`."""
    if not any(name == "momentum" and words[:1] not in ([], ["0"], ["0.0"]) for name, words in groups):
        return groups
    return [
        (name, ["momentum", *words[1:]] if name == "optimiser" and words[:1] == ["sgd"] else words)
        for name, words in groups
    ]


def _apply_switches(groups: list[tuple[str | None, list[str]]]) -> list[tuple[str | None, list[str]]]:
    """A flag that switches another option on or off goes, and takes that option with it where it says off."""
    for flag, (option, default) in SWITCHES.items():
        words = next((words for name, words in groups if name == flag), None)
        if words is None:
            continue
        on = _truth(flag, words[0] if words else None)
        groups = [(name, group) for name, group in groups if name != flag and (on or name != option)]
        if on and all(name != option for name, _ in groups):
            groups.append((option, [default]))
    return groups


def translate(arguments: Sequence[str]) -> list[str]:
    """A command line with every old spelling replaced by ours; a refused one is an error that says why."""
    groups = [(RENAMED.get(name, name) if name else None, words) for name, words in _split(arguments)]
    result: list[str] = []
    for name, words in _sgd_with_momentum(_steps_to_iterations(_apply_switches(groups))):
        if name is None:
            result += words
        elif name in REFUSED:
            raise ConfigError(f"--{name} is not offered: {REFUSED[name]}")
        elif name in REPLACED:
            result += REPLACED[name] + words
        elif name in SPECIAL:
            result += SPECIAL[name](words[0] if words else None) + words[1:]
        elif name in WORDED and words:
            result += [f"--{'' if _truth(name, words[0]) else 'no-'}{WORDED[name]}", *words[1:]]
        elif name in WORDED:
            result.append(f"--{WORDED[name]}")
        else:
            result += [f"--{name}", *words]
    return result
