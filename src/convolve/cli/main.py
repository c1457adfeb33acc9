"""The `convolve` command: find the verb, parse its flags, run it, turn errors into one line and an exit code."""

import sys
from collections.abc import Sequence
from importlib import import_module

from convolve import __version__
from convolve.distributed.topology import is_rank_zero
from convolve.errors import ConfigError, ConvolveError, suggest, to_one_line

COMMANDS = {
    "train": "train a network; without arguments, LeNet on MNIST",
    "launch": "train on many hosts, and go on after a failure",
    "restore": "go on with a run exactly where it stopped",
    "validate": "test accuracy of stored checkpoints",
    "predict": "classify pictures with a trained network",
    "export": "write a trained network as ONNX, pt2, machine code or weights",
    "serve": "answer over HTTP, with a page to draw on",
    "report": "one HTML page about a run, or several side by side",
    "average": "one network from several checkpoints of a run",
    "convert": "make a pickled state dict of another library safe to load",
    "align": "train one config in several number formats and see where they part",
    "configs": "list the named configs, or show one",
    "data": "list, fetch, check or prepare data sets",
    "bench": "measure one part alone: train, data, infer",
    "plan": "memory, timetable and speed of a training on devices that need not be there",
    "describe": "layer table and drawing of a network",
    "doctor": "what works on this machine and what does not",
}

ALIASES = {"infer-bench": ("bench", "infer")}


def _usage() -> str:
    lines = [f"  {verb:<10} {summary}" for verb, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: convolve VERB [options]     convolve VERB --help tells more",
            "",
            *lines,
            "",
            "every verb takes --json (one JSON object as the last line) and --debug (full traceback on an error)",
        ]
    )


def dispatch(arguments: Sequence[str]) -> int:
    """Run one verb and return the exit code."""
    verb = arguments[0] if arguments else "--help"
    if verb in ALIASES:
        return dispatch([*ALIASES[verb], *arguments[1:]])
    if verb in ("-h", "--help"):
        print(_usage())
        return 0
    if verb == "--version":
        print(f"convolve {__version__}")
        return 0
    if verb not in COMMANDS:
        raise ConfigError(f"'{verb}' is not a verb; {suggest(verb, COMMANDS)}")
    code: int = import_module(f"convolve.cli.{verb}").run(arguments[1:])
    return code


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in given
    try:
        code = dispatch([word for word in given if word != "--debug"])
    except ConvolveError as error:
        if debug:
            raise
        # Every rank meets a wrong option; one of them says so.
        if is_rank_zero() or not isinstance(error, ConfigError):
            print(f"convolve: {error}", file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:
        code = 1
    except KeyboardInterrupt:
        print("convolve: stopped", file=sys.stderr)
        code = 130
    except Exception as error:
        if debug:
            raise
        told = f"{type(error).__name__}: {to_one_line(error)}"
        print(f"convolve: {told} (a defect of convolve; --debug shows where)", file=sys.stderr)
        code = 1
    sys.exit(code)
