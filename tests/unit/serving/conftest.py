"""One short training on the shipped digits for all tests of this room."""

import pytest

from convolve.config.loading import resolve
from convolve.loggers.base import SilentConsole
from convolve.runs import session


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving") / "run"
    given = {"epochs": 6, "threads": 1, "run_dir": folder, "curves": False}
    session.train(resolve("lenet-digits", None, given).config, SilentConsole())
    return folder
