"""Callbacks and loggers of a run: they observe. What changes the result is an option, a loss or a module."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from convolve import plugins
from convolve.errors import ConfigError, describe
from convolve.loggers.base import Console, RunInfo, TrainRecord, ValidationRecord
from convolve.run_files import CHECKPOINTS_FOLDER, STATE_FILE, checkpoint_name

if TYPE_CHECKING:
    from convolve.api.records import Checkpoint
    from convolve.api.run import Run

STATE_KEY = "callbacks"


class Callback:
    """Observes a run. Override the methods that you need."""

    def on_start(self, run: Run) -> None:
        """Called once when training starts or resumes."""

    def on_log(self, record: TrainRecord) -> None:
        """Called for each log point of training."""

    def on_validation(self, record: ValidationRecord) -> None:
        """Called for each validation."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Called for each checkpoint, once it is complete on disk."""

    def on_end(self, run: Run) -> None:
        """Called once when training ends or was stopped."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain JSON. It is stored in every checkpoint."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Receive the state of the checkpoint from which a run resumes."""


CallbackLike: TypeAlias = "str | Callback | Callable[[], Callback]"
"""A callback, a class or function that makes one, or a name."""
_METHODS = ("on_start", "on_log", "on_validation", "on_checkpoint", "on_end", "restore")


def read_callbacks(given: Sequence[CallbackLike]) -> tuple[Callback, ...]:
    """Return callbacks, made of classes and names where these are given. A name that the user typed is trusted."""
    if isinstance(given, str):
        raise ConfigError(f"callbacks {given}: one name; give a list of callbacks")
    return tuple(_read_callback(item) for item in given)


def _read_callback(given: Any) -> Callback:
    name = given if isinstance(given, str) else getattr(given, "__qualname__", type(given).__qualname__)
    if isinstance(given, str):
        if ":" in given:
            plugins.trust(given)
        given = plugins.CALLBACKS.resolve(given)
    if not isinstance(given, Callback) and callable(given):
        try:
            given = given()
        except Exception as error:
            raise ConfigError(
                f"callback {name}: cannot be made ({describe(error)}); give a class or function without arguments"
            ) from error
    if not isinstance(given, Callback):
        raise ConfigError(f"callback {name}: is {type(given).__name__}; give a convolve.Callback")
    for method in _METHODS:
        try:
            inspect.signature(getattr(given, method)).bind(None)
        except TypeError as error:
            names = "(self, run)" if method in ("on_start", "on_end") else "(self, one argument)"
            raise ConfigError(f"callback {name}: {method}: {error}; write def {method}{names}") from None
    return given


class CallbackConsole(Console):
    """Forwards everything to a console, and then to the callbacks."""

    def __init__(self, console: Console, callbacks: Sequence[Callback], make_run: Callable[[Path], Run]) -> None:
        self._console = console
        self._callbacks = tuple(callbacks)
        self._make_run = make_run
        self.run: Run | None = None
        self.on_start: Callable[[Run], object] = lambda run: None

    def state(self) -> dict[str, Any]:
        """Return the states of the callbacks as an entry of a checkpoint; empty if there are no callbacks."""
        if not self._callbacks:
            return {}
        states = [callback.state() for callback in self._callbacks]
        for callback, state in zip(self._callbacks, states, strict=True):
            try:
                json.dumps(state, allow_nan=False)
            except (TypeError, ValueError) as error:
                name = type(callback).__qualname__
                raise ConfigError(
                    f"callback {name}: state() is not plain JSON ({error}); return plain values"
                ) from None
        return {STATE_KEY: states}

    def start(self, run: RunInfo) -> None:
        self.run = self._make_run(run.folder)
        self.on_start(self.run)
        self._console.start(run)
        if run.restored_step is not None:
            self._restore(run.folder / CHECKPOINTS_FOLDER / checkpoint_name(run.restored_step) / STATE_FILE)
        self._each(lambda callback: callback.on_start(self._started()))

    def train(self, record: TrainRecord) -> None:
        self._console.train(record)
        self._each(lambda callback: callback.on_log(record))

    def valid(self, record: ValidationRecord) -> None:
        self._console.valid(record)
        self._each(lambda callback: callback.on_validation(record))

    def event(self, kind: str, **details: object) -> None:
        self._console.event(kind, **details)
        if kind == "checkpoint" and self._callbacks:
            checkpoint = self._started().checkpoint(str(details["path"]))
            self._each(lambda callback: callback.on_checkpoint(checkpoint))

    def end(self) -> None:
        """Call `on_end` of a run that started."""
        if self.run is not None:
            self._each(lambda callback: callback.on_end(self._started()))

    def info(self, line: str) -> None:
        self._console.info(line)

    def progress(self, task: str, done: int, total: int | None, /) -> None:
        self._console.progress(task, done, total)

    def _started(self) -> Run:
        assert self.run is not None, "a run starts before anything else"
        return self.run

    def _restore(self, path: Path) -> None:
        states: Any = None
        with suppress(OSError, ValueError):
            states = json.loads(path.read_text()).get(STATE_KEY)
        if isinstance(states, list):
            for callback, state in zip(self._callbacks, states, strict=False):
                if isinstance(state, dict):
                    callback.restore(state)

    def _each(self, call: Callable[[Callback], None]) -> None:
        """Call all callbacks; an exception passes unchanged, with a note that names the callback."""
        for callback in self._callbacks:
            try:
                call(callback)
            except Exception as error:
                note = f"raised by callback {type(callback).__qualname__}"
                self._console.info(note)
                if sys.version_info >= (3, 11):
                    error.add_note(note)
                raise
