"""What tests share: a private cache, small runs on the shipped digits, the `convolve` command as a child process."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from convolve.app import train
from convolve.app.console import SilentConsole
from convolve.config.loading import resolve


@pytest.fixture(autouse=True)
def private_surroundings(tmp_path_factory, monkeypatch):
    """No test sees the user's cache, data folders or runs."""
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("DATA_DIR", "DATASETS_DIR"):
        monkeypatch.delenv(name, raising=False)


def digits_config(folder, **given):
    """A short training on the shipped digits in an exact folder."""
    small = {"dataset": "digits", "epochs": 1, "run_dir": folder, "threads": 1, "curves": False}
    return resolve(
        "lenet5-mnist", None, {"warmup_epochs": 0, "lr_schedule": "constant", "augment": "none", **small, **given}
    ).config


@pytest.fixture
def train_digits(tmp_path):
    """Train on the digits in this process and return the report."""

    def run(name="run", **given):
        return train.run(digits_config(tmp_path / name, **given), SilentConsole())

    return run


def weights_hash(run_dir: Path) -> str:
    """sha256 of the newest checkpoint's weights."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()


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
