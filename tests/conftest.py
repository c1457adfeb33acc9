"""What tests share: a private cache, small runs on the shipped digits, the `convolve` command as a child process."""

import json
import os
import subprocess
import sys

import pytest

from convolve.app import train
from convolve.app.console import SilentConsole
from digit_runs import digits_config


@pytest.fixture(autouse=True)
def private_surroundings(tmp_path_factory, monkeypatch):
    """No test sees the user's cache, data folders or runs."""
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("DATA_DIR", "DATASETS_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def train_digits(tmp_path):
    """Train on the digits in this process and return the report."""

    def run(name="run", **given):
        return train.run(digits_config(tmp_path / name, **given), SilentConsole())

    return run


@pytest.fixture
def command(tmp_path):
    """Run the `convolve` command; returns the finished process, with the JSON of its last line as `.json`."""

    def run(*arguments, **options):
        words = [sys.executable, "-m", "convolve", *map(str, arguments)]
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 240, "check": False, **options}
        done = subprocess.run(words, env={**os.environ, **options.pop("env", {})}, **options)
        last = (done.stdout or "").strip().splitlines()[-1:]
        done.json = json.loads(last[0]) if "--json" in arguments and last and done.returncode in (0, 1) else None
        return done

    return run
