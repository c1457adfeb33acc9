"""Engines of a trained model compute what it computes, from verified files in the private cache."""

import re
from pathlib import Path
from shutil import which

import numpy as np
import pytest
import torch

from convolve import device
from convolve.checkpoint.store import choose_checkpoint
from convolve.cli.main import dispatch
from convolve.data.lookup import load_digits
from convolve.errors import ConvolveError
from convolve.inference.classifier import LoadOptions, load_classifier
from convolve.inference.engines.factory import open_engine
from convolve.inference.engines.probe import TOLERANCE
from convolve.inference.engines.trained import TrainedSource
from convolve.inference.metadata import metadata_of
from convolve.runs.load import load_trained

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

AOTI = pytest.param("aoti", marks=[pytest.mark.slow, pytest.mark.skipif(not which("g++"), reason="no g++")])


def open_source(run):
    trained = load_trained(choose_checkpoint(run), device_name="cpu")
    return TrainedSource(trained.model, metadata_of(trained), 1)


def require(name):
    if name in ("onnxruntime", "openvino"):
        pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.mark.parametrize("name", ["torch", "onnxruntime", "openvino", AOTI])
def test_every_engine_computes_the_logits_of_the_model_at_any_batch_size(digits_run, name):
    require(name)
    source = open_source(digits_run)
    engine = open_engine(name, source, print, (8,))
    images = load_digits().test.images
    for size in (1, 3, 8, 20, 100):
        batch = np.ascontiguousarray(images[:size])
        expected, logits = source.reference()(batch), engine.run(batch)
        assert logits.dtype == np.float32 and logits.shape == expected.shape
        assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()
    kept, first = logits.copy(), logits
    engine.run(np.ascontiguousarray(images[100:200]))
    assert np.array_equal(first, kept), "logits belong to the caller"


def test_a_damaged_export_is_written_again(digits_run):
    require("onnxruntime")
    source = open_source(digits_run)
    source.open("onnxruntime", None)
    (path,) = device.cache_folder().glob(f"engines/onnx-{source._content('onnx')}-*.onnx")
    assert path.stat().st_mode & 0o077 == 0
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    open_engine("onnxruntime", open_source(digits_run), print)
    assert path.read_bytes() == data or not path.exists()


def test_the_export_of_a_model_with_other_weights_is_another_file(digits_run):
    source, other = open_source(digits_run), open_source(digits_run)
    with torch.no_grad():
        next(other.model.parameters()).mul_(1.001)
    assert source._content("onnx") != other._content("onnx") and source.structure == other.structure
    assert source._content("onnx") == open_source(digits_run)._content("onnx")


def test_an_engine_with_the_export_of_another_model_is_rejected(digits_run, monkeypatch):
    require("onnxruntime")
    source, other = open_source(digits_run), open_source(digits_run)
    with torch.no_grad():
        next(other.model.parameters()).mul_(1.1)
    monkeypatch.setattr(TrainedSource, "_content", lambda self, format_name: "0" * 16)
    other.open("onnxruntime", None)
    with pytest.raises(ConvolveError, match="--engine onnxruntime: logits of lenet-bn differ by"):
        open_engine("onnxruntime", source, print)
    for path in device.cache_folder().glob(f"engines/onnx-{'0' * 16}-*"):
        path.unlink()


def test_aoti_takes_part_in_auto_only_if_it_is_compiled(digits_run, tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path))
    assert open_source(digits_run).quick_names == ("torch", "onnxruntime", "openvino")


def test_a_classifier_names_its_engine_and_agrees_with_torch(digits_run):
    require("onnxruntime")
    path, images = choose_checkpoint(digits_run), np.ascontiguousarray(load_digits().test.images[:50])
    torch_probabilities = load_classifier(path, LoadOptions(threads=1)).classify(images)
    classifier = load_classifier(path, LoadOptions("onnxruntime", 1))
    assert classifier.engine.name == "onnxruntime" and classifier.model is not None
    assert np.abs(classifier.classify(images) - torch_probabilities).max() < 1e-4
    assert np.allclose(torch_probabilities.sum(axis=1), 1, atol=1e-6)


def test_validate_reports_the_same_accuracy_with_another_engine(digits_run, capsys):
    require("onnxruntime")
    found = []
    for words in ((), ("--engine", "onnxruntime")):
        assert dispatch(["validate", str(digits_run), *words]) == 0
        found.append(re.search(r"accuracy ([\d.]+)% of 297 images", capsys.readouterr().out)[1])
    assert found[0] == found[1]


def test_predict_reports_its_engine(digits_run, tmp_path, capsys):
    from PIL import Image

    Image.fromarray(load_digits().test.images[0, :, :, 0]).save(tmp_path / "digit.png")
    assert dispatch(["predict", str(digits_run), str(tmp_path / "digit.png"), "--json"]) == 0
    assert f'"engine": "torch {torch.__version__}"' in capsys.readouterr().out.splitlines()[-1]


def test_the_cache_lists_engines(digits_run, capsys):
    require("onnxruntime")
    open_source(digits_run).open("onnxruntime", None)
    assert dispatch(["cache", "list", "--kind", "engines"]) == 0
    assert re.search(r"^engines +onnx-[0-9a-f]{16}-", capsys.readouterr().out, re.MULTILINE)
    assert Path(device.cache_folder() / "engines").stat().st_mode & 0o077 == 0
