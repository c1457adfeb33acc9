"""When native layers are used, and the reason that is printed if they are not."""

import pytest
import torch

from convolve.config.loading import build as make_config
from convolve.loggers.base import SilentConsole
from convolve.numerics import select
from convolve.numerics.select import select_numerics
from convolve.runs import session

CPU = torch.device("cpu")
TINY = {"dataset": "digits", "model": "lenet-bn", "batch_size": 32, "iterations": 1, "report": False, "curves": False}


class Recorder(SilentConsole):
    def __init__(self):
        self.lines = []

    def info(self, text):
        self.lines.append(text)


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(select, "explain_missing", lambda model: "no C compiler")


def explain(where=CPU, **options):
    config = make_config({**TINY, **options})
    return select.why_no_kernels(config, torch.nn.Identity(), select_numerics(config.precision, CPU), where)


def test_a_run_prints_why_it_has_no_native_layers(no_compiler, tmp_path):
    console = Recorder()
    session.train(make_config({**TINY, "run_dir": tmp_path / "run"}), console)
    assert "native kernels unavailable (no C compiler); using PyTorch's, which are slower" in console.lines


def test_no_reason_is_given_if_native_layers_could_not_be_used(no_compiler):
    assert explain() == "no C compiler"
    assert explain(kernels="torch") is None
    assert explain(precision="16.16") is None
    assert explain(where=torch.device("meta")) is None
