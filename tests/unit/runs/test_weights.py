"""License and source of published weights follow a run: summary, checkpoints, restores, exports and successors."""

import hashlib
import json

import pytest
import torch

from convolve.checkpoint.pretrained import find_weights
from convolve.checkpoint.store import find_checkpoints
from convolve.checkpoint.weights_table import WEIGHTS, Preprocessing, WebSource, WeightsInfo
from convolve.config.loading import read_saved, resolve
from convolve.config.schema import ModelConfig
from convolve.export.export import export
from convolve.inference.formats import read_weights
from convolve.loggers.base import SilentConsole
from convolve.models import registry
from convolve.runs import session
from convolve.runs.changes import Changes
from convolve.runs.load import load_trained

OPTIONS = {"model": "lenet-bn", "dataset": "digits", "batch_size": 64, "iterations": 2, "threads": 1, "report": False}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Publish weights of lenet-bn in an offline folder; return the folder and the model."""
    folder = tmp_path_factory.mktemp("published")
    options = ModelConfig(model="lenet-bn")
    model = registry.build("lenet-bn", classes=10, input_shape=(1, 28, 28), seed=9, options=options)
    torch.save(model.state_dict(), folder / "lenet.pth")
    file = folder / "lenet.pth"
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    source = WebSource("http://127.0.0.1:9/", file.rename(folder / f"lenet-{sha256[:8]}.pth").name, sha256, 1 << 20)
    preprocessing = Preprocessing("symmetric", 28, 1.0, "bilinear")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WEIGHTS, "lenet-bn", WeightsInfo("lenet-bn", source, "test", "MIT", preprocessing))
        yield folder, model


@pytest.fixture(scope="module")
def run(published, tmp_path_factory):
    """Train two steps from these weights and return the run folder and the lines printed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    given = {**OPTIONS, "weights": "imagenet", "weights_dir": published[0], "run_dir": folder}
    session.train(resolve(None, None, given).config, SilentConsole())
    return folder


def test_a_run_stores_the_weights_that_it_started_from(run):
    stored = json.loads((run / "summary.json").read_text())["weights"]
    assert (stored["name"], stored["license"]) == ("lenet-bn", "MIT")
    assert load_trained(find_checkpoints(run)[-1]).weights == stored


def test_the_stored_config_repeats_the_run(run):
    config = read_saved(run / "config.yml")
    assert config.model.weights == "lenet-bn"
    assert (config.data.normalization, config.data.image_size) == ("symmetric", 28)


def test_a_restored_run_needs_no_weights_and_keeps_the_license(run, published, monkeypatch):
    def fail(*arguments):
        raise AssertionError("weights were looked for")

    monkeypatch.setattr(session, "find_weights", fail)
    session.resume(run, SilentConsole(), Changes(iterations=3))
    assert load_trained(find_checkpoints(run)[-1]).weights["license"] == "MIT"


def test_an_export_contains_the_license(run, tmp_path):
    report = export(run, "safetensors", SilentConsole(), output=tmp_path / "model.safetensors")
    _, metadata = read_weights(report.path)
    assert (metadata.weights["name"], metadata.weights["license"]) == ("lenet-bn", "MIT")


def test_a_run_that_starts_from_this_one_inherits_the_license(run):
    config = resolve(None, None, {**OPTIONS, "weights": str(run)}).config
    weights = find_weights(config, SilentConsole())
    assert (weights.license, weights.path) == ("MIT", run)


def test_runs_without_weights_store_nothing(digits_run):
    assert "weights" not in json.loads((digits_run / "summary.json").read_text())
    assert load_trained(find_checkpoints(digits_run)[-1]).weights is None
