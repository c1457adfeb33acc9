"""Entry point: find the command, run it, and turn errors into one line and an exit code."""

import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from convolve import __version__
from convolve.api.session import in_command
from convolve.compat.options import RejectedOptions
from convolve.distributed.topology import is_rank_zero
from convolve.errors import ConfigError, ConvolveError, DeviceFailedError, GuaranteeWarning, suggest, to_one_line
from convolve.loggers.streams import drop_output, prepare_streams

COMMANDS = {
    "train": "train a model; without arguments, LeNet on MNIST",
    "launch": "train on several hosts, and restart after a failure",
    "restore": "resume a run from its newest checkpoint",
    "find-lr": "suggest a learning rate",
    "sweep": "train once for each combination of option values",
    "validate": "compute the test accuracy of saved checkpoints",
    "predict": "classify images with a trained model",
    "export": "export a trained model as ONNX, pt2, machine code or weights",
    "serve": "serve trained models over HTTP, with a web page to draw on",
    "report": "write an HTML report of one run, or of several side by side",
    "average": "average several checkpoints of a run into one model",
    "convert": "convert a pickled state dict of another library to safetensors",
    "align": "train one config in several number formats and find where they diverge",
    "configs": "list the named configs, or show one",
    "data": "list, fetch, check or prepare data sets",
    "bench": "measure the speed of training, data loading or inference",
    "plan": "estimate memory, pipeline schedule and speed without the hardware",
    "cache": "list or remove cached weights, features and data sets",
    "describe": "show the layers of a model as a table or drawing",
    "doctor": "check what works on this machine",
    "completion": "print a script that completes commands in bash, zsh or fish",
}

ALIASES = {"infer-bench": ("bench", "infer"), "resume": ("restore",)}


def _usage() -> str:
    lines = [f"  {command:<10} {summary}" for command, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: convolve COMMAND [options]     Run 'convolve COMMAND --help' for details.",
            "",
            *lines,
            "",
            "All commands accept --json (print the result as a JSON object on the last line) and --debug (print a",
            "traceback on errors).",
        ]
    )


def dispatch(argv: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    command = argv[0] if argv else "--help"
    if command in ALIASES:
        return dispatch([*ALIASES[command], *argv[1:]])
    if command in ("-h", "--help"):
        print(_usage())
        return 0
    if command == "--version":
        print(f"convolve {__version__}")
        return 0
    if command not in COMMANDS:
        raise ConfigError(f"unknown command '{command}'; {suggest(command, COMMANDS)}")
    with in_command():
        code: int = import_module(f"convolve.cli.{command.replace('-', '_')}").run(argv[1:])
    return code


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    words = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in words
    prepare_streams()
    # The console prints these lines.
    warnings.simplefilter("ignore", GuaranteeWarning)
    try:
        code = dispatch([word for word in words if word != "--debug"])
    except ConvolveError as error:
        if debug:
            raise
        # All ranks hit the same config error; print it once.
        if is_rank_zero() or not isinstance(error, ConfigError):
            _complain(error)
        if isinstance(error, RejectedOptions):
            _complain(f"corrected command: {error.corrected_command(words)}")
        code = error.exit_code
        if isinstance(error, DeviceFailedError):
            # A thread of autograd may still run Python: tearing down the interpreter would abort the process.
            os._exit(_flush(code))
    except BrokenPipeError:
        code = 1
        drop_output()
    except KeyboardInterrupt:
        _complain("stopped")
        code = 130
    except Exception as error:
        if debug:
            raise
        problem = f"{type(error).__name__}: {to_one_line(error)}"
        _complain(f"internal error: {problem}; rerun with --debug and report it")
        code = 1
    sys.exit(_flush(code))


def _complain(problem: object) -> None:
    """Print one line. Errors about options start with the command, such as `convolve train`, already."""
    line = str(problem)
    with suppress(OSError, ValueError):
        print(line if line.startswith("convolve ") else f"convolve: {line}", file=sys.stderr, flush=True)


def _flush(code: int) -> int:
    """Write what is still buffered; return the exit code, which is 1 if that fails."""
    try:
        sys.stdout.flush()
        return code
    except OSError as error:
        drop_output()
        if not isinstance(error, BrokenPipeError):
            _complain(f"cannot print the result ({error.strerror}); free disk space or print elsewhere")
        return code or 1
