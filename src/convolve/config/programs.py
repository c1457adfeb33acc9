"""Old options of the programs beside training: validating, resuming, averaging, inference, data sets, launching.

The originals had a program for each, and most wanted the whole training command line again. Here a checkpoint holds its
own options, so these verbs take few; what else was usual is translated, or refused with a reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from convolve.config.refusals import GRAPHCORE, REFUSED
from convolve.config.schema import SECTION_OF
from convolve.config.spellings import RENAMED, REPLACED, split_options
from convolve.errors import ConfigError

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
            "train-preprocess-steps": "--image-size N resizes to centred squares; crops are made while training",
            "validation-preprocess-steps": "--image-size N resizes to centred squares; crops are made while training",
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
