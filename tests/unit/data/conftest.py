from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_samples import Sample, Server, running_server


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's data, the user's cache or any network beyond this machine."""
    for name in ("DATA_DIR", "DATASETS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server() as state:
        yield state


@pytest.fixture
def sample() -> Sample:
    chance = np.random.default_rng(5)
    return Sample(
        (
            chance.integers(0, 256, (40, 28, 28), np.uint8),
            chance.integers(0, 10, 40, np.int64),
            chance.integers(0, 256, (20, 28, 28), np.uint8),
            chance.integers(0, 10, 20, np.int64),
        )
    )
