"""Exported files compute what the model computes and contain everything needed to use them."""

import json
import tempfile
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import which

import numpy as np
import pytest
import torch

from convolve import rng
from convolve.checkpoint.store import choose_checkpoint
from convolve.cli.main import dispatch
from convolve.config.schema import ModelConfig
from convolve.data.transforms.normalize import Transform
from convolve.errors import CheckpointError, ConfigError, ConvolveError, ExportDiffersError
from convolve.export import export, int8
from convolve.export.export import compare, sample_pixels
from convolve.export.reference import export_module, reference_predictor
from convolve.inference.engines.base import is_installed
from convolve.inference.formats import FORMATS, ExportModule, open_export, read_weights, write_export
from convolve.inference.metadata import ModelMetadata, metadata_of
from convolve.layers.batch_norm import BatchNorm2d
from convolve.layers.fold import count_batch_norms, fold_batch_norms
from convolve.loggers.base import SilentConsole
from convolve.models import registry
from convolve.runs import session
from convolve.runs.load import iter_test_batches, load_trained, open_run_data, to_pixels
from digit_runs import digits_config
from norm_steps import update_statistics

PHOTO_MODELS = [name for name in ("resnet18", "efficientnet-b0") if name in registry.names()]

OPENVINO = pytest.param(
    "openvino",
    marks=pytest.mark.skipif(not is_installed("openvino"), reason="the extra 'openvino' is not installed"),
)
SLOW_AOTI = pytest.param("aoti", marks=[pytest.mark.slow, pytest.mark.skipif(not which("g++"), reason="no g++")])

needs_onnx = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def run_folder(digits_run):
    return digits_run


@pytest.fixture(scope="module")
def exported(run_folder, tmp_path_factory):
    """The report of an export of the run; each format is written once."""

    @cache
    def write(name):
        path = tmp_path_factory.mktemp("exported") / f"out{FORMATS[name].suffix}"
        return export.export(run_folder, name, SilentConsole(), output=path)

    return write


def train_a_few_steps(model):
    """Train on noise so weights and batch-norm statistics leave their initial values."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model.train()
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        images = torch.rand(16, *model.input_shape, generator=generator)
        labels = torch.randint(10, (16,), generator=generator)
        optimizer.zero_grad()
        with rng.at(seed=0, step=step, first=0):
            torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        update_statistics(model)


def model_and_metadata(name):
    shape = (1, 28, 28) if name.startswith(("lenet", "cnn")) else (3, 32, 32)
    transform = Transform(shape[1], shape[2], (0.4,) * shape[0], (0.3,) * shape[0])
    model = registry.build(name, classes=10, input_shape=shape, seed=1, options=ModelConfig(model=name))
    train_a_few_steps(model)
    model.eval()
    return model, ModelMetadata(name, tuple("0123456789"), transform, "digit" if shape[0] == 1 else "photo", 5, "x")


@needs_onnx
@pytest.mark.parametrize("form", ["onnx", OPENVINO, "pt2", SLOW_AOTI])
@pytest.mark.parametrize("name", ["lenet-bn", *(pytest.param(name, marks=pytest.mark.slow) for name in PHOTO_MODELS)])
def test_an_export_equals_its_model(name, form, tmp_path):
    if form == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    model, metadata = model_and_metadata(name)
    path = tmp_path / f"model{FORMATS[form].suffix}"
    write_export(form, ExportModule(fold_batch_norms(model), metadata.transform), metadata, path)
    predictor, stored = open_export(form, path)
    assert stored == metadata
    norms = [module for module in model.modules() if isinstance(module, BatchNorm2d)]
    assert all(norm.running_mean.abs().max() > 0 and norm.running_var.min() != 1 for norm in norms)

    def reference(pixels):
        with torch.inference_mode():
            return model(metadata.transform(torch.from_numpy(pixels))).numpy()

    channels, height, width = metadata.transform.shape
    result = compare(predictor, reference, sample_pixels(height, width, channels))
    assert result.batches == (1, 2, 7)
    assert result.largest_difference <= 1e-4 and result.same_predictions


@needs_onnx
@pytest.mark.parametrize("form", ["onnx", OPENVINO, "pt2", SLOW_AOTI])
def test_an_export_predicts_every_test_image_as_the_run_does(form, exported, run_folder):
    if form == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    trained = load_trained(choose_checkpoint(run_folder))
    predictor, metadata = open_export(form, exported(form).path)
    reference = reference_predictor(trained)
    assert metadata == metadata_of(trained)
    total = 0
    for pixels, _ in iter_test_batches(open_run_data(trained, SilentConsole())):
        assert (predictor(pixels).argmax(1) == reference(pixels).argmax(1)).all()
        total += len(pixels)
    assert total == 297


@needs_onnx
def test_the_frozen_file_is_one_file_with_constant_weights(run_folder, tmp_path):
    onnx = pytest.importorskip("onnx", reason="the extra 'export' is not installed")
    report = export.export(run_folder, "frozen", SilentConsole(), output=tmp_path / "frozen.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["frozen.onnx"]
    graph = onnx.load(str(report.path), load_external_data=False).graph
    assert [value.name for value in graph.input] == ["pixels"]
    assert all(not item.external_data for item in graph.initializer)


@needs_onnx
def test_int8_accuracy_is_close_to_that_of_the_model(exported, run_folder, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    report = export.export(run_folder, "onnx", SilentConsole(), output=tmp_path / "small.onnx", int8=True)
    assert report.test_samples == 297
    assert abs(report.accuracy - report.int8_accuracy) <= 3 / 297
    whole = exported("onnx")
    assert report.bytes < whole.bytes / 2
    stored, plain = open_export("onnx", report.path)[1], open_export("onnx", whole.path)[1]
    assert replace(stored, quantization=None) == plain
    assert stored.quantization == {
        "float_accuracy": report.accuracy,
        "accuracies": report.int8_accuracies,
        "test_samples": 297,
    }
    assert report.int8_accuracies["onnxruntime"] == report.int8_accuracy


@needs_onnx
def test_int8_of_an_ir_is_measured_with_openvino(exported, run_folder, tmp_path):
    pytest.importorskip("openvino", reason="the extra 'openvino' is not installed")
    report = export.export(run_folder, "openvino", SilentConsole(), output=tmp_path / "small.xml", int8=True)
    assert {path.name for path in tmp_path.iterdir()} == {"small.xml", "small.bin"}
    assert report.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert (tmp_path / "small.bin").stat().st_size < exported("openvino").path.with_suffix(".bin").stat().st_size / 2
    trained = load_trained(choose_checkpoint(run_folder))
    predictor, metadata = open_export("openvino", report.path)
    batches = [*iter_test_batches(open_run_data(trained, SilentConsole()))]
    correct = sum(int((predictor(pixels).argmax(1) == labels).sum()) for pixels, labels in batches)
    assert report.int8_accuracy == correct / 297 and abs(report.accuracy - report.int8_accuracy) <= 3 / 297
    assert metadata.quantization["accuracies"] == {"openvino": correct / 297}


@needs_onnx
def test_a_failed_ir_leaves_no_file(run_folder, tmp_path, monkeypatch):
    pytest.importorskip("openvino", reason="the extra 'openvino' is not installed")
    (tmp_path / "model.bin").write_bytes(b"before")
    monkeypatch.setattr(export, "TOLERANCE", -1)
    with pytest.raises(ConvolveError, match="model.xml: logits differ"):
        export.export(run_folder, "openvino", SilentConsole(), output=tmp_path / "model.xml")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


@needs_onnx
def test_int8_that_loses_too_much_is_rejected_and_an_engine_that_does_cannot_run_the_file(
    run_folder, tmp_path, monkeypatch
):
    pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    lost = {"onnxruntime": 0.7, "openvino": 0.9}
    monkeypatch.setattr(int8, "_measure", lambda *given: int8.Int8Accuracy(0.9, dict(lost), 297))
    path = tmp_path / "small.onnx"
    with pytest.raises(ConvolveError, match=r"^--int8: loses 20.00% of accuracy \(90.00% to 70.00%\), more"):
        export.export(run_folder, "onnx", SilentConsole(), output=path, int8=True)
    assert not list(tmp_path.iterdir())
    lost.update(onnxruntime=0.9, openvino=0.7)
    report = export.export(run_folder, "onnx", SilentConsole(), output=path, int8=True)
    assert report.int8_accuracies == {"onnxruntime": 0.9}
    with pytest.raises(ConfigError, match="--max-accuracy-loss 2: must be 0 to 1"):
        export.export(run_folder, "onnx", SilentConsole(), output=path, int8=True, max_accuracy_loss=2)


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "efficientnet-cifar"])
def test_every_format_of_a_deep_model_predicts_all_digits_alike(name, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    session.train(digits_config(tmp_path / "run", model=name, report=False), SilentConsole())
    trained = load_trained(choose_checkpoint(tmp_path / "run"))
    predictors = [reference_predictor(trained)]
    for form in ("onnx", *(["openvino"] if is_installed("openvino") else []), "pt2", "aoti"):
        report = export.export(tmp_path / "run", form, SilentConsole())
        assert report.largest_difference <= 1e-4
        predictors.append(open_export(form, report.path)[0])
    total = 0
    for pixels, _ in iter_test_batches(open_run_data(trained, SilentConsole())):
        first, *others = (predictor(pixels).argmax(1) for predictor in predictors)
        assert all((first == other).all() for other in others)
        total += len(pixels)
    assert total == 297


def test_batch_norms_are_folded_in_a_graph(run_folder):
    trained = load_trained(choose_checkpoint(run_folder))
    assert count_batch_norms(trained.model) == 1
    assert count_batch_norms(export_module(trained, "pt2")) == 0
    assert count_batch_norms(export_module(trained, "safetensors")) == 1


def test_exported_weights_are_bit_identical(run_folder, tmp_path):
    report = export.export(run_folder, "safetensors", SilentConsole(), output=tmp_path / "weights.safetensors")
    weights, metadata = read_weights(report.path)
    expected = load_trained(choose_checkpoint(run_folder)).model.state_dict()
    assert set(weights) == set(expected) and all(torch.equal(weights[name], expected[name]) for name in expected)
    assert metadata.classes == tuple("0123456789")


@needs_onnx
@pytest.mark.parametrize("form", ["onnx", OPENVINO, "pt2", "safetensors", SLOW_AOTI])
def test_an_exported_file_has_the_permissions_of_any_new_file(form, exported, tmp_path):
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in exported(form).path.parent.iterdir()}
    assert modes == {(tmp_path / "new").stat().st_mode}


def test_the_command_exports_into_the_run_folder(run_folder, capsys):
    assert dispatch(["export", str(run_folder), "--format", "pt2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["path"] == str(run_folder.resolve() / "model.pt2")
    assert report["batches"] == [1, 2, 7] and report["largest_difference"] <= 1e-4
    with zipfile.ZipFile(report["path"]) as archive:
        assert any(name.endswith("convolve.json") for name in archive.namelist())


class Chaos(torch.nn.Module):
    """A model whose logits depend on the last bits of its input."""

    def forward(self, images):
        return torch.sin(1e8 * images.flatten(1)[:, 300:310])


@pytest.mark.parametrize(
    "chaotic, remedy",
    [(False, "try another --format"), (True, r"own logits change by \S+ with the last bits of its input; train")],
)
def test_a_rejected_export_says_if_the_model_is_the_cause(run_folder, tmp_path, monkeypatch, chaotic, remedy):
    trained = load_trained(choose_checkpoint(run_folder))
    wrong = lambda pixels: 2 * reference_predictor(trained)(pixels)  # noqa: E731
    monkeypatch.setattr(export, "open_export", lambda *args: (wrong, metadata_of(trained)))
    if chaotic:
        monkeypatch.setattr(export, "load_trained", lambda *args, **options: replace(trained, model=Chaos()))
    with pytest.raises(ExportDiffersError, match=f"model.pt2: logits differ .* was written; .*{remedy}") as found:
        export.export(run_folder, "pt2", SilentConsole(), output=tmp_path / "model.pt2")
    assert (found.value.sensitivity > export.TOLERANCE) == chaotic
    assert not list(tmp_path.iterdir())


def test_the_difference_of_a_wrong_export_is_measured():
    reference = lambda pixels: np.full((len(pixels), 3), 5, np.float32)  # noqa: E731
    wrong = lambda pixels: np.full((len(pixels), 3), 5.05, np.float32)  # noqa: E731
    assert compare(wrong, reference, sample_pixels(4, 4, 1)).largest_difference == pytest.approx(0.01, rel=1e-5)
    with pytest.raises(ConvolveError, match="shape"):
        compare(lambda pixels: np.zeros((2, 3), np.float32), reference, sample_pixels(4, 4, 1))


def test_wrong_options_are_reported_in_one_line(run_folder, tmp_path):
    with pytest.raises(ConfigError, match="--format pt3: unknown format; did you mean pt2"):
        export.export(run_folder, "pt3", SilentConsole())
    with pytest.raises(ConfigError, match="only if they end in .pt2"):
        export.export(run_folder, "aoti", SilentConsole(), output=tmp_path / "model.aoti")
    with pytest.raises(ConfigError, match="OpenVINO reads openvino files only if they end in .xml; rename it"):
        export.export(run_folder, "openvino", SilentConsole(), output=tmp_path / "model.ir")
    with pytest.raises(ConfigError, match="--int8 with --format pt2: not supported; use --format onnx or openvino"):
        export.export(run_folder, "pt2", SilentConsole(), int8=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConvolveError, match="cannot write"):
        export.export(run_folder, "safetensors", SilentConsole(), output=tmp_path / "file" / "x.safetensors")


def test_a_file_without_metadata_is_rejected(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(CheckpointError, match="contains no convolve metadata"):
        read_weights(tmp_path / "plain.safetensors")
    with pytest.raises(CheckpointError, match="cannot read its metadata"):
        ModelMetadata.from_json("{}", "x")


def test_pixels_survive_a_transform_and_its_inverse():
    pixels = np.random.default_rng(1).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    transform = Transform(6, 5, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    assert (to_pixels(transform(torch.from_numpy(pixels)), transform) == pixels).all()


def test_an_aoti_package_of_another_program_is_not_loaded(tmp_path):
    """It is a program: loading it runs its code."""
    path = tmp_path / "model.aoti.pt2"
    path.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="contains a program that this command has not written"):
        open_export("aoti", path)


@pytest.mark.slow
@pytest.mark.skipif(not which("g++"), reason="no g++")
def test_machine_code_is_compiled_and_loaded_in_private_folders_only(tmp_path, monkeypatch):
    """Not in /tmp/torchinductor_NAME, which any user can create first."""
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(shared))
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    model, metadata = model_and_metadata("lenet-bn")
    path = tmp_path / "model.aoti.pt2"
    write_export("aoti", ExportModule(fold_batch_norms(model), metadata.transform), metadata, path)
    opened = open_export("aoti", path)
    mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    loaded = [library for library in mapped if "data/aotinductor" in library.as_posix()]
    assert loaded and opened
    folders = [folder for library in loaded for folder in library.parents if folder.exists()]
    assert not any(folder.stat().st_mode & 0o022 and not folder.stat().st_mode & 0o1000 for folder in folders)
    assert not list(shared.rglob("*.so")), "nothing is compiled in the system's temporary folder"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="has not written"):
        open_export("aoti", path)
