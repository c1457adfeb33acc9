"""Two runs, a server of both and a browser, started once for all tests of the pages."""

import re

import numpy as np
import pytest

from browser_session import WEBCAM, open_browser, photo
from convolve.config.loading import resolve
from convolve.loggers.base import SilentConsole
from convolve.runs import session
from forked_commands import Running


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A model of drawn digits and a model of photos."""
    folder = tmp_path_factory.mktemp("browser")
    digits = {"epochs": 8, "threads": 1, "run_dir": folder / "digits", "curves": False}
    session.train(resolve("lenet-digits", None, digits).config, SilentConsole())
    make_photos(folder / "photos")
    photos = {"model": "resnet8-cifar", "data_dir": folder / "photos", "image_size": 32, "epochs": 6, "batch_size": 8}
    photos |= {"learning_rate": 0.05, "threads": 1, "run_dir": folder / "colors", "curves": False}
    session.train(resolve(None, None, photos).config, SilentConsole())
    return folder


def make_photos(folder):
    """Two classes that a few steps can separate: reddish and bluish noise."""
    random = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 4)):
        for name, channel in (("red", 0), ("blue", 2)):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                photo(random, channel).save(folder / split / name / f"{number}.jpg")


@pytest.fixture(scope="session")
def serve():
    """Start servers of some models; return process and address. All are stopped at the end."""
    servers = []

    def start(*arguments):
        server = Running("serve", *arguments, "--port", "0", "--threads", "1", "--engine", "torch")
        servers.append(server)
        found = next((found for line in server.stdout if (found := re.search(r"http://\S+", line))), None)
        assert found, "the server did not start"
        return server, found[0].rstrip("/")

    yield start
    for server in servers:
        with server.stdout:
            assert server.stop() == 0


@pytest.fixture(scope="session")
def address(runs, serve):
    return serve(*(f"{name}={runs / name}" for name in ("digits", "colors")))[1]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile"), WEBCAM) as driver:
        yield driver


@pytest.fixture
def browser(chromium):
    """The browser with logs that are empty."""
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    return chromium
