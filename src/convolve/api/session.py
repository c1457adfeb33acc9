"""Around every call of the API: the process is left as it was found, and messages use the names of Python.

`session` saves CPU threads, determinism switches, the random states of torch, numpy and `random`, signal handlers,
logging, environment variables and warning filters, and restores them. A command sets `in_command`, which keeps the
spelling of the command line in messages.
"""

import logging
import os
import random
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from convolve.errors import ConfigError, ConvolveError

_in_command: ContextVar[bool] = ContextVar("in_command", default=False)
_training = threading.Lock()
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def in_command() -> Iterator[None]:
    """Mark the calls inside as made by a command: messages keep the spelling of the command line."""
    token = _in_command.set(True)
    try:
        yield
    finally:
        _in_command.reset(token)


@contextmanager
def session() -> Iterator[None]:
    """Restore the state of the process after the block, and spell options in errors as in Python."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for keep in (_keep_environment, _keep_logging, _keep_signals, _keep_random, _keep_torch):
            stack.enter_context(keep())
        try:
            yield
        except ConvolveError as error:
            if not _in_command.get():
                error.args = (respell(str(error)),)
            raise


@contextmanager
def training() -> Iterator[None]:
    """Reject a second training in this process while the block runs. Time budgets count from its start."""
    from convolve.runs.clock import count_from_now

    if not _training.acquire(blocking=False):
        raise ConfigError("train: another run is in progress in this process; wait for it, or use another process")
    try:
        with nullcontext() if _in_command.get() else count_from_now():
            yield
    finally:
        _training.release()


@contextmanager
def _keep_environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        if dict(os.environ) != before:
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def _keep_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.manager.disable, root.level, root.handlers[:])
    try:
        yield
    finally:
        root.manager.disable, root.level, root.handlers[:] = before


@contextmanager
def _keep_signals() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _keep_random() -> Iterator[None]:
    import numpy as np
    import torch

    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@contextmanager
def _keep_torch() -> Iterator[None]:
    import torch

    fill: Any = torch.utils.deterministic
    threads, filled = torch.get_num_threads(), fill.fill_uninitialized_memory
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        fill.fill_uninitialized_memory = filled


_FLAG_WITH_VALUE = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*) ([^\s:,;`]+)")
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")
_RESTORE = re.compile(r"`convolve restore ([^`]+)`")


def respell(message: str) -> str:
    """Return a message of the command line with the names of Python: `--batch-size 0` becomes `batch_size=0`."""
    message = _RESTORE.sub(r"`convolve.open('\1').resume()`", message)
    subject, colon, rest = message.partition(":")
    subject = _FLAG_WITH_VALUE.sub(lambda match: f"{_name(match[1])}={match[2]}", subject)
    return _FLAG.sub(lambda match: _name(match[1]), f"{subject}{colon}{rest}")


def _name(flag: str) -> str:
    return flag.replace("-", "_")
