"""Exported ONNX files and OpenVINO IRs are classified and served by onnxruntime or OpenVINO, without torch."""

import json
import re
import shutil
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
from convolve.inference.exported import open_ir_file, open_onnx_file
from convolve.loggers.base import SilentConsole

pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def onnx_file(digits_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "digits.onnx"
    return export(digits_run, "onnx", SilentConsole(), output=path).path


@pytest.fixture(scope="module")
def ir_file(digits_run, tmp_path_factory):
    pytest.importorskip("openvino", reason="the extra 'openvino' is not installed")
    path = tmp_path_factory.mktemp("exported") / "digits.xml"
    return export(digits_run, "openvino", SilentConsole(), output=path).path


def copy_ir(ir_file, folder):
    for file in (ir_file, ir_file.with_suffix(".bin")):
        shutil.copy(file, folder)
    return folder / ir_file.name


def test_both_engines_agree_and_torch_is_rejected(onnx_file):
    pytest.importorskip("openvino", reason="the extra 'openvino' is not installed")
    images = np.ascontiguousarray(load_digits().test.images[:40])
    found = [load_classifier(onnx_file, LoadOptions(name, 1)).classify(images) for name in ("onnxruntime", "openvino")]
    assert np.abs(found[0] - found[1]).max() < 1e-4
    with pytest.raises(ConfigError, match="--engine torch: cannot run digits.onnx; "):
        load_classifier(onnx_file, LoadOptions("torch", 1))


def test_an_ir_equals_the_onnx_file_at_any_batch_size_and_runs_with_openvino_only(onnx_file, ir_file):
    images = np.ascontiguousarray(load_digits().test.images[:40])
    classifier, reference = load_classifier(ir_file, LoadOptions(threads=1)), load_classifier(onnx_file, LoadOptions())
    assert classifier.engine.name == "openvino" and classifier.metadata == reference.metadata
    for count in (1, 3, 40):
        assert np.abs(classifier.classify(images[:count]) - reference.classify(images[:count])).max() < 1e-4
    for name in ("torch", "onnxruntime"):
        with pytest.raises(ConfigError, match=f"--engine {name}: cannot run digits.xml; "):
            load_classifier(ir_file, LoadOptions(name, 1))


def test_python_loads_an_ir(ir_file):
    import convolve

    classifier = convolve.load(ir_file)
    assert classifier.engine.startswith("openvino ") and classifier.classes == tuple("0123456789")


def test_an_ir_with_weights_of_another_export_is_rejected(ir_file, tmp_path):
    path = copy_ir(ir_file, tmp_path)
    weights = bytearray(path.with_suffix(".bin").read_bytes())
    weights[100] ^= 1
    path.with_suffix(".bin").write_bytes(weights)
    with pytest.raises(CheckpointError, match=r"digits\.bin: not the weights of digits\.xml; export the run again"):
        open_ir_file(path, 1)
    path.with_suffix(".bin").unlink()
    with pytest.raises(CheckpointError, match=r"digits\.bin: no such file; an OpenVINO model is digits\.xml with"):
        open_ir_file(path, 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "not a model",
        lambda text: text[: len(text) // 2],
        lambda text: '<?xml version="1.0"?><net name="x" version="11"><layers/></net>',
        lambda text: re.sub(r'type="Convolution"', 'type="Unheard" version="extension"', text),
        lambda text: re.sub(r'offset="\d+"', 'offset="99999999999"', text),
        lambda text: re.sub(r'size="\d+"', 'size="99999999999"', text),
        lambda text: re.sub(r"weights_sha256", "other", text),
        lambda text: re.sub(r"(?s)<rt_info>.*</rt_info>", "", text),
    ],
)
def test_a_damaged_ir_is_reported_in_one_line(ir_file, tmp_path, damage):
    path = copy_ir(ir_file, tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(CheckpointError, match=r"^[^\n]*digits\.(xml|bin): [^\n]+$"):
        open_ir_file(path, 1)


def test_an_exported_file_is_explained_by_occlusion(onnx_file):
    classifier = load_classifier(onnx_file, LoadOptions(threads=1))
    images = np.ascontiguousarray(load_digits().test.images[:3])
    heatmaps = classifier.explain(images, classifier.classify(images).argmax(axis=1))
    assert classifier.saliency == "occlusion" and heatmaps.shape == (3, 28, 28)
    ink = images[..., 0] > 128
    assert all(heatmap[one].mean() > heatmap.mean() for heatmap, one in zip(heatmaps, ink, strict=True))


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


@pytest.mark.parametrize(
    ("kind", "engine"), [("onnx_file", "onnxruntime"), ("ir_file", "openvino"), ("onnx_file", "auto")]
)
def test_a_server_of_an_exported_file_does_not_load_torch(kind, engine, request, tmp_path):
    pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")
    file = request.getfixturevalue(kind)
    words = ["serve", str(file), "--port", "0", "--threads", "1", "--engine", engine]
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
        assert set(prediction) >= {"label", "probability"}
        assert prediction["explanation"].startswith("data:image/png;base64,")
        with urllib.request.urlopen(f"{address}samples") as response:
            assert json.loads(response.read()) == {"samples": {}}
        with urllib.request.urlopen(f"{address}metrics") as response:
            (found,) = re.findall(r'convolve_engine_info{model="digits",engine="([^"]+)"', response.read().decode())
        assert found == engine or engine == "auto"
        with urllib.request.urlopen(f"{address}models") as response:
            assert json.loads(response.read())["models"][0]["engine"].startswith(f"{found} ")
        server.terminate()
        assert server.wait(30) == 0, "torch was imported, or the server failed"


def png_of(pixels):
    import base64
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0]).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


SIGNAL_AFTER_ENGINES = """
import os, signal, sys
from pathlib import Path
from convolve.inference.engines.onnx import open_openvino
signal.signal(signal.SIGUSR1, lambda number, frame: print("handled"))
engines = [open_openvino(Path(sys.argv[1]), 1, size) for size in (1, 2)]
for _ in range(2):
    del engines[0]
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_signal_is_handled_after_engines_of_openvino_are_closed_in_the_order_of_their_opening(ir_file):
    found = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SIGNAL_AFTER_ENGINES, ir_file], capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (0, "handled\n"), found.stderr
