"""One short training on the shipped digits for all tests of this room."""

import pytest

from convolve.app import train
from convolve.app.console import SilentConsole
from convolve.config.loading import resolve


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving") / "run"
    given = {"epochs": 6, "threads": 1, "run_dir": folder, "curves": False}
    train.run(resolve("lenet-digits", None, given).config, SilentConsole())
    return folder
