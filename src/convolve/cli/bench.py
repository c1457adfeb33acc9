"""`convolve bench`: finds the part that is to be measured."""

from collections.abc import Sequence
from importlib import import_module

from convolve.errors import ConfigError, suggest

PARTS = {
    "train": "training: images/s, step times, and the share of the machine's arithmetic",
    "data": "the input alone, without a network",
    "infer": "answers of a network: as it is, with folded norms, exported, in eight bits",
}


def run(arguments: Sequence[str]) -> int:
    """Measure one part alone."""
    part = arguments[0] if arguments else "--help"
    if part in ("-h", "--help"):
        print("usage: convolve bench PART [options]     convolve bench PART --help tells more\n")
        print("\n".join(f"  {name:<10} {what}" for name, what in PARTS.items()))
        raise SystemExit(0)
    if part not in PARTS:
        raise ConfigError(f"bench {part}: no such part; {suggest(part, PARTS)}")
    code: int = import_module(f"convolve.cli.bench_{part}").run(arguments[1:])
    return code
