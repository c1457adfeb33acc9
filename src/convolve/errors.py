"""All errors of convolve.

    ConvolveError
    ├── ConfigError       an option, a config file or a combination of options breaks a rule   exit 2
    ├── DataError         a data set is missing, damaged or not what it claims to be           exit 1
    │   └── ImageTooLargeError   an image has more pixels than are accepted                    exit 1
    ├── CheckpointError   a checkpoint is missing, damaged or does not fit                     exit 1
    ├── DeviceError       a device or a capability of it is not available                      exit 2
    ├── DeviceFailedError a device stopped working during a run                                exit 1
    ├── DivergedError     the loss is not finite                                               exit 1
    ├── NumericsError     a value overflowed its number format, and the run was to stop then    exit 1
    ├── CorruptionError   a value changed in memory, or was computed wrongly                   exit 1
    ├── ParallelError     processes disagree, or one of them is lost                           exit 1
    ├── SandboxError      untrusted input crashed its process, or needed too much time or memory      exit 1
    ├── GuaranteeError    a guarantee does not hold, and the run was to be strict              exit 2
    └── ExtraError        an optional extra is not installed                                   exit 2

Every message is one line: `subject: problem; remedy`.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ConvolveError(Exception):
    """Base of all errors that convolve raises on purpose; the command exits with `exit_code`.

    The message is one line, `subject: problem`, followed by an optional table. `problem` is that line without the
    subject, for callers that print the subject elsewhere.
    """

    exit_code = 1

    def __init__(self, problem: object, table: str = "", *, subject: object = None) -> None:
        self.problem = to_one_line(problem)
        line = self.problem if subject is None else f"{to_one_line(subject)}: {self.problem}"
        super().__init__("\n".join(filter(None, (line, table))))


class ConfigError(ConvolveError, ValueError):
    """An option, a config file or a combination of options breaks a rule."""

    exit_code = 2


class DataError(ConvolveError):
    """A data set is missing, damaged or not what it claims to be."""


class ImageTooLargeError(DataError):
    """An image has more pixels than are accepted; found in its header, before anything is decoded."""


class CheckpointError(ConvolveError):
    """A checkpoint is missing, damaged or does not fit."""


class DeviceError(ConvolveError):
    """A device, or a capability of it, is not available."""

    exit_code = 2


class DeviceFailedError(DeviceError):
    """A device stopped working during a run. Its threads may still be busy."""

    exit_code = 1


class DeviceMemoryError(DeviceFailedError):
    """A device has too little memory for a run."""

    exit_code = 2


class DivergedError(ConvolveError):
    """The loss is not finite."""


class NumericsError(ConvolveError):
    """A value overflowed its number format, and the run was to stop then."""


class CorruptionError(ConvolveError):
    """A value changed in memory between two updates, or differs when it is computed again. Nothing is saved."""


class ParallelError(ConvolveError):
    """Processes disagree, or one of them is lost."""


class SandboxError(ConvolveError):
    """Untrusted input crashed the process that read it, or needed too much time or memory."""


class ExportDiffersError(ConvolveError):
    """An export and its model compute other logits; `sensitivity` is how much the model's change with rounding."""

    def __init__(self, message: str, sensitivity: float = 0.0) -> None:
        super().__init__(message)
        self.sensitivity = sensitivity


class GuaranteeError(ConvolveError):
    """A guarantee does not hold, and the run was to be strict."""

    exit_code = 2


class ExtraError(ConvolveError, ImportError):
    """An optional extra is not installed."""

    exit_code = 2

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra '{extra}'; install it with: pip install 'convolve[{extra}]'")


class GuaranteeWarning(UserWarning):
    """A guarantee, such as exact resuming, does not hold for this run. The message names it and the reason."""


def to_one_line(message: object) -> str:
    """Escape line breaks and control characters, which untrusted names may contain."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(message))


def describe(error: BaseException) -> str:
    """Return the type and the first line of an exception, for the middle of a message."""
    lines = str(error).strip().splitlines()
    return to_one_line(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)[:200]


def suggest(given: str, known: Iterable[str]) -> str:
    """Return the end of an "unknown name" message: the closest known names, or all if there are few."""
    names = sorted(set(known))
    near = get_close_matches(given, names, n=3, cutoff=0.55)
    if near:
        return f"did you mean {' or '.join(near)}?"
    if len(names) <= 24:
        return f"known: {', '.join(names)}"
    return f"known: {', '.join(names[:24])} and {len(names) - 24} more"
