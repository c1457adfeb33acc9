"""Option names of the systems that convolve replaces: what each is called here.

The tables hold the digit examples of Paddle on IPU and of Ascend (TensorFlow 1 and 2), and Graphcore's applications in
TensorFlow and PyTorch. Underscores and dashes are the same everywhere, so only names that differ otherwise are listed.

Old options of the programs beside training: validating, resuming, averaging, inference, data sets, launching.

The originals had a program for each, and most wanted the whole training command line again. Here a checkpoint holds its
own options, so these verbs take few; what else was usual is translated, or refused with a reason.
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
        raise ConfigError(f"{name}={value}: write True or False")
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
    raise ConfigError(f"distribution-strategy={value}: strategies are not chosen by name here; {ONE_DEVICE}")


def _batch_norm_momentum(value: str | None) -> list[str]:
    """PyTorch's momentum is the share of the new statistics, a decay the share of the old ones."""
    try:
        return ["--bn-decay", f"{1 - float(value or ''):.12g}"]
    except ValueError:
        raise ConfigError(f"batchnorm-momentum={value}: must be a number; it is 1 - bn-decay") from None


def _normalization_location(value: str | None) -> list[str]:
    places = {"host": ["--hostside-norm"], "ipu": ["--no-hostside-norm"], "none": ["--normalization", "unit"]}
    if value not in places:
        raise ConfigError(f"normalization-location={value}: must be host, ipu or none")
    return places[value]


def _loss_scale(value: str | None) -> list[str]:
    """Ascend's value: 0 is its own changing rule, 1 and more a constant factor."""
    return ["--loss-scaling-rule", "ascend"] if value in ("0", "0.0") else ["--loss-scaling", value or ""]


def _data(value: str | None) -> list[str]:
    """Graphcore's PyTorch application has made-up data among the names of data sets."""
    made_up = {"generated": ["--generated-data"], "synthetic": ["--synthetic-data"]}
    return made_up.get(value or "", ["--dataset", value or ""])


def _recompute_mode(value: str | None) -> list[str]:
    if value not in ("none", "auto", "manual"):
        raise ConfigError(f"recompute-mode={value}: must be none, auto or manual")
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
    """Options with the words that follow them; words before the first option stand under None."""
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
        (name, ["momentum", *words[1:]] if name == "optimizer" and words[:1] == ["sgd"] else words)
        for name, words in groups
    ]


def _apply_switches(groups: list[tuple[str | None, list[str]]]) -> list[tuple[str | None, list[str]]]:
    """A flag that switches another option on or off goes, and takes that option with it where it says off."""
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
    """A command line with every old spelling replaced by ours; a refused one is an error that says why.

    Options in `reserved` belong to the command and stay.
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


STORED = "the checkpoint holds the options that it was trained with; leave it out"


@dataclass(frozen=True)
class Program:
    """What the options of an original program become.

    Args:
        flags: the verb's own flags that share their name with a training option.
        places: options whose value is a plain argument here, in the order of these arguments.
        renamed: old names and ours; ours may be several words.
        refused: old names and the reason.
        stored: whether training options are in the checkpoint, so that typing one is a mistake worth explaining.
    """

    flags: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    renamed: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    stored: bool = False


_CHECKPOINT = ("restore-path", "checkpoint-path", "checkpoint-input-path")
LAYOUT = tuple(name.replace("_", "-") for name, section in SECTION_OF.items() if section == "parallel")
_PARTITION = "devices are found by PyTorch on each host; there is no partition to reserve; leave it out"
_MPI = "processes talk through torch.distributed, not MPI; the environment is passed on; leave it out"

PROGRAMS = {
    "validate": Program(
        flags=("data-dir", "batch-size"),
        places=_CHECKPOINT,
        renamed={"imagenet-data-path": ["--data-dir"], "valid-batch-size": ["--batch-size"]},
        refused={
            **{name: GRAPHCORE[name] for name in ("repeat", "inference", "latency", "available-memory-proportion")},
            "generated-data": "accuracy needs real images; `convolve bench infer --generated-data` measures speed",
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
            "draw-ir-graph": "`convolve describe RUN --graph FILE.svg` draws the network",
        },
        stored=True,
    ),
    "data": Program(
        flags=("image-size", "workers"),
        places=("source", "imagenet-data-path", "target"),
        renamed={"samples-per-shard": ["--shard-samples"], "image-quality": ["--quality"]},
        refused={
            "shuffle": "pictures are stored in the order of their names; training shuffles anew in every epoch",
            "seed": "nothing here is random: the same pictures give the same bytes",
            "train-preprocess-steps": "--image-size N resizes to centered squares; crops are made while training",
            "validation-preprocess-steps": "--image-size N resizes to centered squares; crops are made while training",
            "num-instances": "any number of processes can read the same shards; nothing has to be split again",
        },
    ),
    "launch": Program(
        renamed={"host": ["--hosts"]},
        refused={
            "ipus-per-replica": "the number of stages is --shards N after the --, one process each",
            "numa-aware": "cores are shared out between the processes of a host by themselves; leave it out",
            "only-output-from-instance": "rank 0 speaks for all; leave it out",
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


def translate_program(verb: str, arguments: Sequence[str]) -> list[str]:
    """The arguments of a verb beside training with every old spelling replaced; what follows `--` stays as it is."""
    program = PROGRAMS[verb]
    (_, leading), *groups = split_options(arguments)
    placed: dict[str, list[str]] = {}
    rest: list[str] = []
    for name, words in groups:
        assert name is not None, "only the first group has no option"
        if name in program.places:
            placed[name] = words
        else:
            rest += [*_word(verb, program, name), *words]
    return [*leading, *(word for name in program.places for word in placed.get(name, [])), *rest]


def _word(verb: str, program: Program, name: str) -> list[str]:
    if name in program.renamed:
        return program.renamed[name]
    plain = name.replace("-", "_").removeprefix("no_")
    known = plain in SECTION_OF or name in RENAMED or name in REPLACED or name in ("config", "config-path")
    reason = program.refused.get(name)
    if reason is None and program.stored and known and name not in program.flags:
        reason = STORED
    if reason is not None:
        raise ConfigError(f"--{name} is not offered by convolve {verb}: {reason}")
    return [f"--{name}"]
