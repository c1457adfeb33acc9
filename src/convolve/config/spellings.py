"""Option names of the systems that convolve replaces: what each is called here, or why it is not offered.

The tables hold the digit examples of Paddle on IPU and of Ascend (TensorFlow 1 and 2). Underscores and dashes are the
same everywhere, so only names that differ otherwise are listed.
"""

from collections.abc import Callable, Sequence

from convolve.errors import ConfigError

RENAMED = {
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
}

REPLACED: dict[str, list[str]] = {
    "enable-ce": ["--seed", "90"],
    "no-validation": ["--validation-mode", "none"],
    "disable-metrics": ["--no-metrics"],
    "no-pipelining": ["--shards", "1"],
    "draw-ir-graph": ["--draw-graph"],
}

# Flags that took the words True or False: their value becomes a real switch.
WORDED = {"draw-loss-curve": "curves", "download": "download"}

_ONE_DEVICE = "the number of copies is --replicas N here, on whatever devices there are"
REFUSED = {
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
    return ["--device", "ipu"] if _truth("use-ipu", value) else []


def _distribution(value: str | None) -> list[str]:
    if (value or "").lower() in ("off", "one_device", "mirrored"):
        return []
    raise ConfigError(f"distribution-strategy={value}: strategies are not chosen by name here; {_ONE_DEVICE}")


SPECIAL: dict[str, Callable[[str | None], list[str]]] = {
    "use-ipu": _use_ipu,
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


def translate(arguments: Sequence[str]) -> list[str]:
    """A command line with every old spelling replaced by ours; a refused one is an error that says why."""
    groups = [(RENAMED.get(name, name) if name else None, words) for name, words in _split(arguments)]
    result: list[str] = []
    for name, words in _steps_to_iterations(groups):
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
