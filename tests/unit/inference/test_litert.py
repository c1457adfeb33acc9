"""LiteRT files are converted and run by another environment; without CONVOLVE_LITERT_PYTHON, such tests are skipped."""

import os
import sys
import zipfile
from importlib.util import find_spec

import numpy as np
import pytest

from convolve.checkpoint.store import choose_checkpoint
from convolve.errors import CheckpointError, ConfigError, ConvolveError
from convolve.export.export import export
from convolve.export.reference import reference_predictor
from convolve.inference import litert
from convolve.inference.formats import open_export
from convolve.inference.metadata import metadata_of
from convolve.loggers.base import SilentConsole
from convolve.runs.load import iter_test_batches, load_trained, open_run_data

needs_litert = pytest.mark.skipif(
    not (os.environ.get(litert.VARIABLE) or find_spec("litert_torch")), reason=f"{litert.VARIABLE} is not set"
)


@pytest.mark.slow
@needs_litert
def test_a_litert_file_predicts_every_test_image_as_the_run_does(digits_run, tmp_path):
    report = export(digits_run, "litert", SilentConsole(), output=tmp_path / "model.tflite")
    assert report.batches == (1,) and report.largest_difference <= 1e-4
    trained = load_trained(choose_checkpoint(digits_run))
    predictor, metadata = open_export("litert", report.path)
    assert metadata == metadata_of(trained)
    with zipfile.ZipFile(report.path) as archive:
        assert archive.read("labels.txt").split() == [str(digit).encode() for digit in range(10)]
    batches = [pixels for pixels, _ in iter_test_batches(open_run_data(trained, SilentConsole()))]
    pixels = np.concatenate(batches)
    assert (predictor(pixels).argmax(1) == reference_predictor(trained)(pixels).argmax(1)).all()
    assert len(pixels) == 297


def test_without_an_environment_the_error_says_how_to_make_one(digits_run, tmp_path, monkeypatch):
    monkeypatch.delenv(litert.VARIABLE, raising=False)
    monkeypatch.setattr(litert, "find_spec", lambda name: None)
    with pytest.raises(ConvolveError, match=r"pip install litert-torch 'torch==2\.\d+\.\*'\) and set CONVOLVE_LITERT"):
        export(digits_run, "litert", SilentConsole(), output=tmp_path / "model.tflite")
    assert not list(tmp_path.iterdir())


def test_an_environment_that_fails_is_a_one_line_error(digits_run, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.setenv(litert.VARIABLE, str(tmp_path / "none" / "python"))
    with pytest.raises(ConvolveError, match=r"CONVOLVE_LITERT_PYTHON=.*: cannot execute \(No such file"):
        export(digits_run, "litert", SilentConsole(), output=folder / "model.tflite")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho first >&2\necho 'ModuleNotFoundError: litert_torch' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv(litert.VARIABLE, str(broken))
    with pytest.raises(ConvolveError, match=r"^--format litert: convert failed \(ModuleNotFoundError: litert_torch\)"):
        export(digits_run, "litert", SilentConsole(), output=folder / "model.tflite")
    assert not list(folder.iterdir())


@pytest.mark.skipif(find_spec("litert_torch") is not None, reason="litert-torch is installed here")
def test_the_other_environment_imports_nothing_from_the_current_folder(digits_run, tmp_path, monkeypatch):
    monkeypatch.setenv(litert.VARIABLE, sys.executable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "litert_torch.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ConvolveError, match="No module named 'litert_torch'"):
        export(digits_run, "litert", SilentConsole(), output=tmp_path / "model.tflite")


@pytest.mark.parametrize("content", [b"", b"TFL3 no archive", None])
def test_a_file_without_metadata_is_reported_in_one_line(content, tmp_path):
    path = tmp_path / "model.tflite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^[^\n]*model\.tflite: cannot read its metadata [^\n]+$"):
        litert.read_litert(path)


def test_int8_is_rejected(digits_run):
    with pytest.raises(ConfigError, match="--int8 with --format litert: not supported; use --format onnx or openvino"):
        export(digits_run, "litert", SilentConsole(), int8=True)
