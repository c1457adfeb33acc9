"""Options of other systems that depend on each other: several of them together have one meaning here.

A command line is a list of groups, an option and its words. Every function here takes such a list and returns one.
"""

from collections.abc import Callable, Sequence

from convolve.compat.names import ending_block
from convolve.config.spelling import canonical
from convolve.errors import ConfigError

Groups = list[tuple[str | None, list[str]]]

# Flags that only said whether another option counts: that option, and the value that it had by itself.
SWITCHES = {
    "data-dump-flag": ("data-dump-step", "10"),
    "use-mixlist": ("mixlist-file", "ops_info.json"),
    "loss-scale-flag": ("loss-scale-value", "0"),
}


def parse_bool(name: str, value: str | None) -> bool:
    """Return the value of a switch that takes a word; no word means true."""
    words = {None: True, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    key = None if value is None else value.lower()
    if key not in words:
        raise ConfigError(f"--{name} {value}: must be True or False")
    return words[key]


def split_options(arguments: Sequence[str]) -> Groups:
    """Group a command line by option. Words before the first option are under None."""
    groups: Groups = [(None, [])]
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


def _steps_to_iterations(groups: Groups) -> Groups:
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


def _sgd_with_momentum(groups: Groups) -> Groups:
    """Translate PyTorch's `sgd` with a momentum to `momentum`; TensorFlow's `SGD` has none."""
    momentum = _words(groups, "momentum")
    if momentum is None or momentum[:1] in ([], ["0"], ["0.0"]):
        return groups
    if _words(groups, "optimizer") == ["SGD"]:
        raise ConfigError(
            f"--momentum {momentum[0]} with --optimizer SGD: has no effect, plain SGD has no momentum; "
            "use --optimizer momentum or omit --momentum"
        )
    return [
        (name, ["momentum", *words[1:]] if name == "optimizer" and words[:1] == ["sgd"] else words)
        for name, words in groups
    ]


def _apply_switches(groups: Groups) -> Groups:
    """Remove flags that enable another option, and that option too if the flag is off."""
    for flag, (option, default) in SWITCHES.items():
        words = next((words for name, words in groups if name == flag), None)
        if words is None:
            continue
        on = parse_bool(flag, words[0] if words else None)
        groups = [(name, group) for name, group in groups if name != flag and (on or name != option)]
        if on and all(name != option for name, _ in groups):
            groups.append((option, [default]))
    return groups


def _words(groups: Groups, option: str) -> list[str] | None:
    """Return the words of an option, None if it was not given."""
    return next((words for name, words in reversed(groups) if name == option), None)


def _splits_to_checkpoints(groups: Groups) -> Groups:
    """Translate the splits of a pipeline on one device, which is how Graphcore names the points of recomputation."""
    splits, shards = _words(groups, "pipeline-splits"), _words(groups, "shards")
    if splits in (None, [], ["auto"]) or shards != ["1"] or _words(groups, "enable-recomputation") is None:
        return groups
    blocks = [ending_block(split) for split in splits]
    others = [(name, words) for name, words in groups if name != "pipeline-splits"]
    return [*others, ("recompute-checkpoints", blocks)]


def _splits_to_shards(groups: Groups) -> Groups:
    """Add the number of stages that follows from named splits, as in Graphcore's PyTorch application."""
    splits = _words(groups, "pipeline-splits")
    if not splits or splits == ["auto"] or _words(groups, "shards") or _words(groups, "config"):
        return groups
    return [*groups, ("shards", [str(len(splits) + 1)])]


def _milestones_to_fractions(groups: Groups) -> Groups:
    """Translate `--lr-epoch-decay 30 60 --epochs 100` to `--learning-rate-schedule 0.3 0.6`."""
    milestones, epochs = _words(groups, "lr-epoch-decay"), _words(groups, "epochs")
    if milestones is None:
        return groups
    try:
        total = float((epochs or [""])[0])
        fractions = [f"{float(epoch) / total:.12g}" for word in milestones for epoch in word.split(",") if epoch]
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"--lr-epoch-decay {' '.join(milestones)}: must be epochs at which the rate drops; give --epochs too"
        ) from None
    others = [(name, words) for name, words in groups if name != "lr-epoch-decay"]
    return [*others, ("learning-rate-schedule", fractions)] if fractions else others


def _exponential_drops(groups: Groups) -> Groups:
    """Translate the decay and the frequency of the PyTorch application's exponential schedule to a number of drops."""
    frequency, epochs = _words(groups, "lr-scheduler-freq"), _words(groups, "epochs")
    others = [(name, words) for name, words in groups if name != "lr-scheduler-freq"]
    if _words(groups, "lr-schedule") != ["exponential"] or frequency is None:
        return others
    others = [("lr-decay-rate" if name == "learning-rate-decay" else name, words) for name, words in others]
    try:
        drops = float((epochs or [""])[0]) * float(frequency[0])
    except (ValueError, IndexError):
        raise ConfigError(f"--lr-scheduler-freq {' '.join(frequency)}: must be a number; give --epochs too") from None
    return [*others, ("lr-drops", [f"{drops:.12g}"])] if drops else others


def _averaging_strategy(groups: Groups) -> Groups:
    """Translate the strategy of the PyTorch application, which decides whether its decay or its count is used."""
    strategy = _words(groups, "weight-avg-strategy")
    if strategy is None:
        return groups
    if strategy not in (["none"], ["mean"], ["exponential"]):
        raise ConfigError(f"--weight-avg-strategy {' '.join(strategy)}: must be none, mean or exponential")
    dropped = {
        "none": ("weight-avg-exp", "weight-avg-n"),
        "mean": ("weight-avg-exp",),
        "exponential": ("weight-avg-n",),
    }
    others = [item for item in groups if item[0] not in ("weight-avg-strategy", *dropped[strategy[0]])]
    if strategy == ["exponential"] and _words(others, "weight-avg-exp") is None:
        return [*others, ("weight-avg-exp", ["0.99"])]
    if strategy == ["mean"] and _words(others, "weight-avg-n") in (None, ["-1"]):
        raise ConfigError("--weight-avg-strategy mean: give the number of epochs to average with --weight-avg-N")
    return others


def _loss_scale_ramp(groups: Groups) -> Groups:
    """Translate an initial loss scale other than the final one to a ramp, as in the PyTorch application."""
    first, last = _words(groups, "initial-loss-scaling"), _words(groups, "loss-scaling")
    if first is None or last is None or _words(groups, "loss-scaling-rule") is not None:
        return groups
    if first == last:
        return [item for item in groups if item[0] != "initial-loss-scaling"]
    return [*groups, ("loss-scaling-rule", ["ramp"])]


COMBINATIONS: tuple[Callable[[Groups], Groups], ...] = (
    _apply_switches,
    _steps_to_iterations,
    _sgd_with_momentum,
    _splits_to_checkpoints,
    _splits_to_shards,
    _milestones_to_fractions,
    _exponential_drops,
    _averaging_strategy,
    _loss_scale_ramp,
)
