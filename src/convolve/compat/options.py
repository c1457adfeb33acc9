"""Option names of the systems that convolve replaces, and their names here.

The tables cover the digit examples of Paddle on IPU and of Ascend (TensorFlow 1 and 2), and Graphcore's applications in
TensorFlow and PyTorch. Underscores and dashes are interchangeable, so only names that differ otherwise are listed.

The originals have separate programs for validation, resuming, averaging, inference, data sets and launching, most of
which need the whole training command line again. Here a checkpoint contains its options, so these commands take few.
Other options of the originals are translated, or rejected with a reason.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from convolve.compat.refused import GRAPHCORE, ONE_DEVICE, REFUSED
from convolve.config.schema import SECTION_OF
from convolve.config.spelling import canonical
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
    "no-pipelining": ["--shards", "1"],
    "pipeline": [],
    "draw-ir-graph": ["--draw-graph"],
    "batch-norm": ["--norm-type", "batch"],
    "group-norm": ["--norm-type", "group"],
    "normalize-input": ["--normalization", "imagenet"],
    "eight-bit-io": ["--no-hostside-norm"],
    "no-eight-bit-io": ["--hostside-norm"],
}

# Flags that took the words True or False: their value becomes a real switch.
WORDED = {"draw-loss-curve": "curves", "download": "download", "over-dump": "over-dump"}

# Flags that only said whether another option counts: that option, and the value that it had by itself.
SWITCHES = {
    "data-dump-flag": ("data-dump-step", "10"),
    "use-mixlist": ("mixlist-file", "ops_info.json"),
    "loss-scale-flag": ("loss-scale-value", "0"),
}


def _parse_bool(name: str, value: str | None) -> bool:
    words = {None: True, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    key = None if value is None else value.lower()
    if key not in words:
        raise ConfigError(f"--{name} {value}: must be True or False")
    return words[key]


def _use_ipu(value: str | None) -> list[str]:
    return ["--device-model", "ipu-mk2"] if _parse_bool("use-ipu", value) else []


def _stochastic_rounding(value: str | None) -> list[str]:
    words = {"ON": True, "ON_PRNG_STABLE": True, "RI_PRNG_STABLE": True, "OFF": False}
    on = words[value.upper()] if value and value.upper() in words else _parse_bool("stochastic-rounding", value)
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


def split_options(arguments: Sequence[str]) -> list[tuple[str | None, list[str]]]:
    """Group a command line by option. Words before the first option are under None."""
    groups: list[tuple[str | None, list[str]]] = [(None, [])]
    for position, word in enumerate(arguments):
        if word == "--":
            groups[-1][1].extend(arguments[position:])
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            groups.append((canonical(name.replace("_", "-")), [value] if equals else []))
        else:
            groups[-1][1].append(word)
    return groups


def _steps_to_iterations(groups: list[tuple[str | None, list[str]]]) -> list[tuple[str | None, list[str]]]:
    """Translate `--steps S --epochs E` (steps per epoch) to `--iterations S*E`. 0 steps mean a whole epoch."""
    words = {name: words for name, words in groups if name in ("steps", "epochs")}
    if "steps" not in words:
        return groups
    others = [(name, group) for name, group in groups if name != "steps"]
    if words["steps"][:1] == ["0"]:
        return others
    try:
        total = int(words["steps"][0]) * int(words.get("epochs", ["1"])[0])
    except (ValueError, IndexError):
        raise ConfigError(
            f"--steps {' '.join(words['steps'])}: must be an integer, steps per epoch; 0 means a whole epoch"
        ) from None
    return [(name, group) for name, group in others if name != "epochs"] + [("iterations", [str(total)])]


def _sgd_with_momentum(groups: list[tuple[str | None, list[str]]]) -> list[tuple[str | None, list[str]]]:
    """Translate PyTorch's `sgd` with a momentum to `momentum`."""
    if not any(name == "momentum" and words[:1] not in ([], ["0"], ["0.0"]) for name, words in groups):
        return groups
    return [
        (name, ["momentum", *words[1:]] if name == "optimizer" and words[:1] == ["sgd"] else words)
        for name, words in groups
    ]


def _apply_switches(groups: list[tuple[str | None, list[str]]]) -> list[tuple[str | None, list[str]]]:
    """Remove flags that enable another option, and that option too if the flag is off."""
    for flag, (option, default) in SWITCHES.items():
        words = next((words for name, words in groups if name == flag), None)
        if words is None:
            continue
        on = _parse_bool(flag, words[0] if words else None)
        groups = [(name, group) for name, group in groups if name != flag and (on or name != option)]
        if on and all(name != option for name, _ in groups):
            groups.append((option, [default]))
    return groups


def translate(arguments: Sequence[str], reserved: Container[str] = ()) -> list[str]:
    """Translate the options of other systems in a command line. One that is not offered is an error with its reason.

    Options in `reserved` belong to the command and are kept.
    """
    groups = [(RENAMED.get(name, name) if name else None, words) for name, words in split_options(arguments)]
    result: list[str] = []
    for name, words in _sgd_with_momentum(_steps_to_iterations(_apply_switches(groups))):
        if name is None:
            result += words
        elif name in reserved:
            result += [f"--{name}", *words]
        elif name in REFUSED:
            raise ConfigError(f"--{name} is not offered: {REFUSED[name]}")
        elif name in REPLACED:
            result += REPLACED[name] + words
        elif name in SPECIAL:
            result += SPECIAL[name](words[0] if words else None) + words[1:]
        elif name in WORDED and words:
            result += [f"--{'' if _parse_bool(name, words[0]) else 'no-'}{WORDED[name]}", *words[1:]]
        elif name in WORDED:
            result.append(f"--{WORDED[name]}")
        else:
            result += [f"--{name}", *words]
    return result


STORED = "the checkpoint contains the options that it was trained with; omit it"


@dataclass(frozen=True)
class Program:
    """Translation of the options of an original program.

    Args:
        flags: flags of the command that have the name of a training option.
        places: options whose value is a positional argument here, in the order of these arguments.
        renamed: original names and their replacements, which may be several words.
        refused: original names and the reason why they are not offered.
        stored: True if training options are in the checkpoint; giving one is then an error with that reason.
    """

    flags: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    renamed: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    stored: bool = False


_CHECKPOINT = ("restore-path", "checkpoint-path", "checkpoint-input-path")
LAYOUT = tuple(name.replace("_", "-") for name, section in SECTION_OF.items() if section == "parallel")
_PARTITION = "PyTorch finds the devices of each host, so no partition has to be reserved; omit it"
_MPI = "processes communicate through torch.distributed, not MPI, and inherit the environment; omit it"

PROGRAMS = {
    "validate": Program(
        flags=("data-dir", "batch-size"),
        places=_CHECKPOINT,
        renamed={"imagenet-data-path": ["--data-dir"], "valid-batch-size": ["--batch-size"]},
        refused={
            **{name: GRAPHCORE[name] for name in ("repeat", "inference", "latency", "available-memory-proportion")},
            "generated-data": "accuracy needs real images; measure speed with `convolve bench infer --generated-data`",
        },
        stored=True,
    ),
    "restore": Program(flags=("epochs", "iterations", *LAYOUT), places=_CHECKPOINT, stored=True),
    "average": Program(
        places=_CHECKPOINT,
        renamed={"weight-avg-strategy": ["--mode"], "weight-avg-exp-decay": ["--decay"], "weight-avg-N": ["-N"]},
        stored=True,
    ),
    "predict": Program(
        places=("save-dir", "img"),
        refused={
            "ues-ipu-model": REFUSED["ues-ipu-model"],
            "use-ipu": STORED,
            "num-ipus": STORED,
            "no-pipelining": STORED,
            "draw-ir-graph": "draw the model with `convolve describe RUN --graph FILE.svg`",
        },
        stored=True,
    ),
    "data": Program(
        flags=("image-size", "workers"),
        places=("source", "imagenet-data-path", "target"),
        renamed={"samples-per-shard": ["--shard-samples"], "image-quality": ["--quality"]},
        refused={
            "shuffle": "images are stored in order of their names; training shuffles them in every epoch",
            "seed": "preparation is not random: the same images give the same bytes; omit it",
            "train-preprocess-steps": "use --image-size N for centered squares; training makes random crops",
            "validation-preprocess-steps": "use --image-size N for centered squares; training makes random crops",
            "num-instances": "any number of processes can read the same shards; omit it",
        },
    ),
    "launch": Program(
        renamed={"host": ["--hosts"]},
        refused={
            "ipus-per-replica": "use --shards N after the -- for the number of stages, one process each",
            "numa-aware": "cores are divided among the processes of a host automatically; omit it",
            "only-output-from-instance": "only rank 0 prints; omit it",
            "mpi-local-args": _MPI,
            "mpi-global-args": _MPI,
            **dict.fromkeys(
                (
                    "vipu-server-host",
                    "vipu-server-timeout",
                    "vipu-partition",
                    "vipu-cluster",
                    "reset-partition",
                    "update-partition",
                    "num-ilds",
                ),
                _PARTITION,
            ),
        },
    ),
}


def translate_program(command: str, arguments: Sequence[str]) -> list[str]:
    """Translate the options of other systems for a command other than `train`. Arguments after `--` are kept."""
    program = PROGRAMS[command]
    (_, leading), *groups = split_options(arguments)
    placed: dict[str, list[str]] = {}
    rest: list[str] = []
    for name, words in groups:
        assert name is not None, "only the first group has no option"
        if name in program.places:
            placed[name] = words
        else:
            rest += [*_translate_name(command, program, name), *words]
    return [*leading, *(word for name in program.places for word in placed.get(name, [])), *rest]


def _translate_name(command: str, program: Program, name: str) -> list[str]:
    if name in program.renamed:
        return program.renamed[name]
    plain = name.replace("-", "_").removeprefix("no_")
    known = plain in SECTION_OF or name in RENAMED or name in REPLACED or name in ("config", "config-path")
    reason = program.refused.get(name)
    if reason is None and program.stored and known and name not in program.flags:
        reason = STORED
    if reason is not None:
        raise ConfigError(f"--{name} is not offered by convolve {command}: {reason}")
    return [f"--{name}"]
