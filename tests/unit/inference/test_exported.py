"""Exported ONNX files are classified and served by onnxruntime or OpenVINO, without torch."""

import json
import re
import subprocess
import sys
import urllib.request
from dataclasses import replace

import numpy as np
import pytest

from convolve.data.lookup import load_digits
from convolve.errors import CheckpointError, ConfigError
from convolve.export.export import export
from convolve.inference.classifier import LoadOptions, load_classifier
from convolve.inference.engines.factory import open_engine
from convolve.inference.exported import open_onnx_file
from convolve.loggers.base import SilentConsole

pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def onnx_file(digits_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "digits.onnx"
    return export(digits_run, "onnx", SilentConsole(), output=path).path


def test_both_engines_agree_and_torch_is_rejected(onnx_file):
    pytest.importorskip("openvino", reason="the extra 'openvino' is not installed")
    images = np.ascontiguousarray(load_digits().test.images[:40])
    found = [load_classifier(onnx_file, LoadOptions(name, 1)).classify(images) for name in ("onnxruntime", "openvino")]
    assert np.abs(found[0] - found[1]).max() < 1e-4
    with pytest.raises(ConfigError, match="--engine torch: cannot run digits.onnx; "):
        load_classifier(onnx_file, LoadOptions("torch", 1))


def test_an_exported_file_cannot_be_explained(onnx_file):
    classifier = load_classifier(onnx_file, LoadOptions(threads=1))
    with pytest.raises(ConfigError, match=r"digits\.onnx: an exported file has no layers"):
        classifier.explain(np.zeros((1, 28, 28, 1), np.uint8), np.zeros(1, np.int64))


def test_a_quantized_file_runs_only_on_engines_whose_accuracy_was_measured(onnx_file):
    pytest.importorskip("openvino", reason="the extra 'openvino' is not installed")
    source = open_onnx_file(onnx_file, 1)
    quantization = {"float_accuracy": 0.9, "accuracies": {"onnxruntime": 0.9}, "test_samples": 10}
    quantized = replace(source, metadata=replace(source.metadata, quantization=quantization))
    assert quantized.quick_names == ("onnxruntime",) and quantized.tolerance > source.tolerance
    with pytest.raises(ConfigError, match=r"--engine openvino: accuracy of .*digits\.onnx was not measured"):
        open_engine("openvino", quantized, print)


@pytest.mark.parametrize("content", [b"", b"not a model", None])
def test_an_unreadable_file_is_reported_in_one_line(tmp_path, content):
    path = tmp_path / "broken.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^[^\n]*broken\.onnx: (not a readable ONNX file|no such file)[^\n]*$"):
        open_onnx_file(path, 1)


def test_a_server_of_an_exported_file_does_not_load_torch(onnx_file, tmp_path):
    pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")
    words = ["serve", str(onnx_file), "--port", "0", "--threads", "1", "--engine", "onnxruntime"]
    code = f"""
import sys
from convolve.cli.main import dispatch
status = dispatch({words})
sys.exit(3 if "torch" in sys.modules else status)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        address = next(filter(None, (re.search(r"http://\S+/", line) for line in server.stdout)))[0]
        image = json.dumps({"image": png_of(load_digits().test.images[0])}).encode()
        request = urllib.request.Request(f"{address}predict?explain=1", image, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            (prediction,) = json.loads(response.read())["predictions"]
        assert set(prediction) >= {"label", "probability"} and "explanation" not in prediction
        with urllib.request.urlopen(f"{address}metrics") as response:
            assert 'convolve_engine_info{model="digits",engine="onnxruntime",' in response.read().decode()
        with urllib.request.urlopen(f"{address}models") as response:
            assert json.loads(response.read())["models"][0]["engine"].startswith("onnxruntime ")
        server.terminate()
        assert server.wait(30) == 0, "torch was imported, or the server failed"


def png_of(pixels):
    import base64
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0]).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
