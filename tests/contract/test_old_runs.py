"""Runs written by version 0.1 still restore, validate, predict and serve.

tests/fixtures/run-0.1 was written by convolve 0.1 (8 steps of lenet-bn on the built-in digits). Its config and its
checkpoint spell options in British English, as that version did.
"""

import json
import shutil
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from convolve.config.loading import build
from convolve.loggers.base import SilentConsole
from forked_commands import Running

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run-0.1"
DIGITS = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture
def old_run(tmp_path):
    return Path(shutil.copytree(FIXTURE, tmp_path / "run"))


def test_an_old_config_is_read_with_its_british_names():
    from convolve.runs.folder import read_config

    text = (FIXTURE / "config.yml").read_text()
    assert "optimiser: momentum" in text and "normalisation: standard" in text
    config = read_config(FIXTURE)
    assert (config.optim.optimizer, config.data.normalization) == ("momentum", "standard")


def test_british_and_american_names_give_the_same_config():
    british = {
        "optimiser": "adam",
        "normalisation": "symmetric",
        "colour-jitter": [0.1, 0, 0],
        "optimiser_epsilon": 1e-6,
    }
    american = {
        "optimizer": "adam",
        "normalization": "symmetric",
        "color-jitter": [0.1, 0, 0],
        "optimizer_epsilon": 1e-6,
    }
    assert build(british) == build(american)


def test_an_old_run_validates_with_the_accuracy_it_recorded(old_run):
    from convolve.runs.validate import validate

    recorded = json.loads((old_run / "checkpoints" / "step-000000008" / "state.json").read_text())["metrics"]
    [record] = validate(old_run, SilentConsole())
    assert record.accuracy == pytest.approx(recorded["accuracy"], abs=0.01)
    assert record.loss == pytest.approx(recorded["loss"], rel=1e-3)


def test_an_old_run_is_restored_with_its_optimizer_state(old_run):
    from convolve.checkpoint.store import load
    from convolve.runs.changes import Changes
    from convolve.runs.session import resume

    before = load(old_run / "checkpoints" / "step-000000008")
    report = resume(old_run, SilentConsole(), Changes(iterations=9))
    assert report.steps == 9
    after = load(old_run / "checkpoints" / "step-000000009")
    assert set(after.tensors["optimizer"]) == set(before.tensors["optimizer"])
    assert "optimizer: momentum" in (old_run / "config.yml").read_text()


def test_an_old_run_predicts(old_run):
    from convolve.inference.classifier import predict

    report = predict(old_run, [DIGITS], SilentConsole())
    assert len(report.predictions) == len(list(DIGITS.iterdir())) and not report.failures


def test_an_old_run_is_served_with_the_predictions_of_the_command(old_run):
    pytest.importorskip("starlette", reason="the extra 'serve' is not installed")
    pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")
    from convolve.inference.classifier import predict

    image = DIGITS / "7.png"
    [expected] = predict(old_run, [image], SilentConsole()).predictions
    server = Running("serve", old_run, "--port", "0", "--threads", "1", "--engine", "torch", "--json")
    with server.stdout as output:
        url = next(json.loads(line) for line in iter(output.readline, "") if line.startswith("{"))["url"]
        request = Request(f"{url}predict", image.read_bytes(), {"Content-Type": "image/png"})
        with urlopen(request, timeout=30) as response:
            [served] = json.load(response)["predictions"]
        assert server.stop() == 0
    assert served["label"] == expected.label
    assert served["probabilities"] == pytest.approx(expected.probabilities, abs=1e-6)
