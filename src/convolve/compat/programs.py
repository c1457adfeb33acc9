"""Options of the original programs for validation, resuming, averaging, inference, data sets and launching.

Most of these programs need the whole training command line again. Here a checkpoint contains its options, so the
commands take few. Other options of the originals are translated, or rejected with a reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from convolve.compat.combinations import split_options
from convolve.compat.options import RENAMED, REPLACED, RejectedOptions
from convolve.compat.refused import GRAPHCORE, REFUSED
from convolve.config.schema import SECTION_OF

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
        flags=("data-dir", "batch-size", "metrics"),
        places=_CHECKPOINT,
        renamed={"imagenet-data-path": ["--data-dir"], "valid-batch-size": ["--batch-size"]},
        refused={
            **{name: GRAPHCORE[name] for name in ("repeat", "inference", "latency", "available-memory-proportion")},
            "generated-data": "accuracy needs real images; measure speed with `convolve bench infer --generated-data`",
        },
        stored=True,
    ),
    "restore": Program(flags=("epochs", "iterations", "metrics", *LAYOUT), places=_CHECKPOINT, stored=True),
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


_CODE = ("model", "optimizer", "augment")


def translate_program(command: str, arguments: Sequence[str]) -> list[str]:
    """Translate the options of other systems for a command other than `train`. Arguments after `--` are kept.

    Options that are not offered are reported together, each with its reason.
    """
    program = PROGRAMS[command]
    (_, leading), *groups = split_options(arguments)
    placed: dict[str, list[str]] = {}
    rest: list[str] = []
    rejected: dict[str, str] = {}
    for name, words in groups:
        assert name is not None, "only the first group has no option"
        reason = _reject(program, name)
        if name in program.places:
            placed[name] = words
        elif name in _CODE and words and ":" in words[0]:
            # Code is never taken from the checkpoint.
            rest += [f"--{name}", *words]
        elif reason is not None:
            rejected[f"--{name}"] = reason
        else:
            rest += [*program.renamed.get(name, [f"--{name}"]), *words]
    result = [*leading, *(word for name in program.places for word in placed.get(name, [])), *rest]
    if rejected:
        raise RejectedOptions(rejected, arguments, result, f" by convolve {command}")
    return result


def _reject(program: Program, name: str) -> str | None:
    """Return the reason why an option is not offered, or None."""
    if name in program.renamed:
        return None
    plain = name.replace("-", "_").removeprefix("no_")
    known = plain in SECTION_OF or name in RENAMED or name in REPLACED or name in ("config", "config-path")
    reason = program.refused.get(name)
    if reason is None and program.stored and known and name not in program.flags:
        return STORED
    return reason
