"""Several processes of one run, started from Python: named parts travel as values, the user's objects by pickle.

The caller writes a job, and which user code it has loaded, into a private folder, starts one interpreter per rank
that reads them, and follows events.jsonl, so callbacks and progress stay in the calling process. What other processes
cannot import is rejected before anything starts. `python -m convolve.api.ranks JOB` runs one rank.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

from convolve import plugins
from convolve.errors import ConfigError, ConvolveError, ParallelError
from convolve.loggers.base import Console, RunInfo, SilentConsole, TrainRecord, ValidationRecord
from convolve.run_files import EVENTS_FILE

if TYPE_CHECKING:
    from convolve.config import Config
    from convolve.engine.loop import StopRequest
    from convolve.engine.user_code import UserCode
    from convolve.runs.changes import Changes
    from convolve.runs.results import TrainReport

_RESULT, _ERROR = "result", "error"


@dataclass(frozen=True)
class Job:
    """What all ranks run: a new run of `config`, or with `changes`, one that resumes in `folder`."""

    config: Config
    folder: Path
    user: UserCode
    changes: Changes | None = None

    def work(self) -> TrainReport:
        """Train as one rank."""
        from convolve.runs import session

        if self.changes is None:
            return session.train(self.config, SilentConsole(), self.user)
        return session.resume(self.folder, SilentConsole(), self.changes, self.user)


class Work(Protocol):
    """What another process does: `main` leaves the result, or the error, beside the file of the work."""

    def work(self) -> object:
        """Return a result that can be pickled."""


class _Pickler(pickle.Pickler):
    """Rejects classes and functions that other processes cannot import."""

    def __init__(self, buffer: BytesIO, option: str) -> None:
        super().__init__(buffer)
        self._option = option

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            where = "a notebook" if hasattr(sys, "ps1") or "ipykernel" in sys.modules else "the main program"
            raise ConfigError(
                f"{self._option}: {value.__qualname__} is defined in {where}, which other processes cannot import; "
                "put it into a file"
            )
        return NotImplemented


def encode(job: Work, option: str = "--replicas") -> bytes:
    """Return a job with the import path of this process as one block of bytes; `option` needs other processes."""
    buffer = BytesIO()
    paths = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
    buffer.write(json.dumps(paths).encode() + b"\n")
    try:
        _Pickler(buffer, option).dump(plugins.loaded_code())
        _Pickler(buffer, option).dump(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{option}: an object cannot be sent to other processes ({error}); put it into a file"
        ) from error
    return buffer.getvalue()


def run_ranks(job: Job, console: Console, stop: StopRequest) -> TrainReport:
    """Run a job in all processes of its layout on this host, and return the report of rank 0."""
    from convolve.distributed.launch.local import start_processes

    with tempfile.TemporaryDirectory(prefix="convolve-") as folder:
        path = Path(folder) / "job"
        path.write_bytes(encode(job))
        events = _Events(job.folder / EVENTS_FILE, console)

        def poll() -> int | None:
            events.forward()
            return signal.SIGTERM if stop.reason is not None else None

        world = job.config.parallel.processes
        code = start_processes(world, [str(path)], module="convolve.api.ranks", on_poll=poll)
        events.forward()
        report: TrainReport = take_result(path, "replicas", code)
    return report


def take_result(path: Path, subject: str, code: int) -> Any:
    """Return the result of the work in a file, whose process ended with this exit code, or raise its error."""
    if (path.parent / _ERROR).is_file():
        raise pickle.loads((path.parent / _ERROR).read_bytes())
    if not (path.parent / _RESULT).is_file():
        raise ParallelError(f"{subject}: a process ended with exit code {code}; look above for its reason")
    return pickle.loads((path.parent / _RESULT).read_bytes())


class _Events:
    """Forwards the events of a run in other processes to a console."""

    def __init__(self, path: Path, console: Console) -> None:
        self._path = path
        self._console = console
        self._position = path.stat().st_size if path.exists() else 0

    def forward(self) -> None:
        """Forward the complete lines that were written since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                self._forward(json.loads(line))

    def _forward(self, event: dict[str, Any]) -> None:
        kind = event.pop("kind")
        event.pop("time", None)
        if kind == "start":
            names = {field.name for field in fields(RunInfo)}
            info = {name: value for name, value in event.items() if name in names}
            self._console.start(RunInfo(**{**info, "folder": self._path.parent}))
        elif kind == "train":
            self._console.train(TrainRecord(**event))
            self._console.progress("train", event["samples"], None)
        elif kind == "valid":
            self._console.valid(ValidationRecord(**event))
        else:
            self._console.event(kind, **event)


def main(path: Path) -> int:
    """Run one rank of a job and leave its result, or the first error, beside the job."""
    paths, _, payload = path.read_bytes().partition(b"\n")
    sys.path[:] = list(dict.fromkeys([*sys.path, *json.loads(paths)]))
    from convolve import device
    from convolve.distributed.launch.local import follow_launcher
    from convolve.distributed.topology import is_rank_zero

    follow_launcher()
    device.prepare()
    try:
        stream = BytesIO(payload)
        pickle.load(stream).load()
        report = pickle.load(stream).work()
    except BaseException as error:
        _leave(path.parent / _ERROR, _portable(error))
        return error.exit_code if isinstance(error, ConvolveError) else 1
    if is_rank_zero():
        _leave(path.parent / _RESULT, report)
    return 0


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ParallelError(f"{type(error).__name__}: {error}")
    return error


def _leave(path: Path, value: object) -> None:
    """Write a file once; the first rank that fails has the reason, the others only lose their peer."""
    draft = path.with_name(f"{path.name}-{os.getpid()}")
    draft.write_bytes(pickle.dumps(value))
    try:
        os.link(draft, path)
    except FileExistsError:
        return


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
