"""Shared fixtures: a private cache, small runs on the shipped digits, the `convolve` command as a child process.

The process that only hands out tests loads this file too, so nothing here imports torch before a test asks for it.
"""

import gc
import json
import os
import signal
import subprocess
import sys

import pytest

import forked_commands
from digit_runs import digits_config


@pytest.fixture(scope="session", autouse=True)
def private_surroundings(tmp_path_factory):
    """Hide the user's cache, data folders and runs from tests and fixtures.

    All workers use one cache, so native code is compiled and the CPU probed once. A worker compiles many more variants
    than a command does, maybe on a busy machine, so its compiler has more time.
    """
    from convolve.kernels import build

    own = tmp_path_factory.getbasetemp()
    cache = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONVOLVE_CACHE", str(cache))
        patch.setattr(build, "TIME_LIMIT", 3600.0)
        for name in ("DATA_DIR", "DATASETS_DIR"):
            patch.delenv(name, raising=False)
        # urllib keeps the proxies of its first request; local servers must be reached with any.
        patch.setenv("no_proxy", "127.0.0.1")
        yield


@pytest.fixture(scope="session", autouse=True)
def default_interrupt():
    """Let SIGINT interrupt tests that send it, even if a shell started them in the background, where it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Exclude what is alive before a module of tests from garbage collection: every run collects at its end."""
    # It looks for references with the collector when it is imported.
    import hypothesis  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """Train a short run on the built-in digits for tests that need a trained model."""
    from convolve.config.loading import resolve
    from convolve.loggers.base import SilentConsole
    from convolve.runs import session

    folder = tmp_path_factory.mktemp("digits") / "run"
    given = {"epochs": 6, "threads": 1, "run_dir": folder, "curves": False}
    session.train(resolve("lenet-digits", None, given).config, SilentConsole())
    return folder


@pytest.fixture
def train_digits(tmp_path):
    """Train on the digits in this process and return the report."""
    from convolve.loggers.base import SilentConsole
    from convolve.runs import session

    def run(name="run", **given):
        return session.train(digits_config(tmp_path / name, **given), SilentConsole())

    return run


def add_json(done, arguments):
    """Add the JSON of the last line of a finished command as `.json`."""
    last = (done.stdout or "").strip().splitlines()[-1:]
    done.json = json.loads(last[0]) if "--json" in arguments and last and done.returncode in (0, 1) else None
    return done


@pytest.fixture
def command(tmp_path):
    """Run the `convolve` command in a new interpreter; returns the finished process, with its JSON as `.json`."""

    def run(*arguments, env=None):
        words = [sys.executable, "-m", "convolve", *map(str, arguments)]
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 240, "check": False}
        return add_json(subprocess.run(words, env={**os.environ, **(env or {})}, **options), arguments)

    return run


@pytest.fixture
def quick_command(tmp_path):
    """Run the `convolve` command in a process that has imported everything; returns what `command` does."""

    def run(*arguments, env=None):
        return add_json(forked_commands.run(arguments, tmp_path, {**os.environ, **(env or {})}), arguments)

    return run
