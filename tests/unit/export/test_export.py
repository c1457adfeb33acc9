"""Exported files compute what the network computes, and carry all that is needed to use them."""

import json
import zipfile
from functools import cache
from shutil import which

import numpy as np
import pytest
import torch

from convolve.cli.main import dispatch
from convolve.config.schema import ModelConfig
from convolve.data.transforms.normalize import Transform
from convolve.errors import CheckpointError, ConfigError, ConvolveError
from convolve.export import export
from convolve.export.export import compare, reference_predictor, require_equal, sample_pixels
from convolve.export.formats import FORMATS, Classifier, open_export, read_weights, write_export
from convolve.inference.metadata import ModelMetadata, metadata_of
from convolve.layers.batch_norm import BatchNorm2d
from convolve.layers.fold import count_batch_norms, fold_batch_norms
from convolve.loggers.base import SilentConsole
from convolve.models import registry
from convolve.runs import session
from convolve.runs.load import choose_checkpoint, iter_test_batches, load_trained, open_run_data, to_pixels
from digit_runs import digits_config
from norm_steps import settle

# Further networks join by name when the registry has them.
PHOTO_MODELS = [name for name in ("resnet18", "efficientnet-b0") if name in registry.names()]

SLOW_AOTI = pytest.param("aoti", marks=[pytest.mark.slow, pytest.mark.skipif(not which("g++"), reason="no g++")])

needs_onnx = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def run_folder(digits_run):
    return digits_run


@pytest.fixture(scope="module")
def exported(run_folder, tmp_path_factory):
    """The report of an export of the run; each format is written once."""

    @cache
    def write(form):
        place = tmp_path_factory.mktemp("exported") / f"out{FORMATS[form].suffix}"
        return export.export(run_folder, form, SilentConsole(), output=place)

    return write


def learn_a_little(network):
    """A few steps on noise: weights and statistics of norms leave their first values."""
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    network.train()
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        images = torch.rand(16, *network.input_shape, generator=generator)
        labels = torch.randint(10, (16,), generator=generator)
        network.chance.move(0, step, 0)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
        settle(network)


def network_and_card(name):
    shape = (1, 28, 28) if name.startswith(("lenet", "cnn")) else (3, 32, 32)
    transform = Transform(shape[1], shape[2], (0.4,) * shape[0], (0.3,) * shape[0])
    network = registry.build(name, classes=10, input_shape=shape, seed=1, options=ModelConfig(model=name))
    learn_a_little(network)
    network.eval()
    return network, ModelMetadata(name, tuple("0123456789"), transform, "digit" if shape[0] == 1 else "photo", 5, "x")


@needs_onnx
@pytest.mark.parametrize("form", ["onnx", "pt2", SLOW_AOTI])
@pytest.mark.parametrize("name", ["lenet-bn", *(pytest.param(name, marks=pytest.mark.slow) for name in PHOTO_MODELS)])
def test_an_export_equals_its_network(name, form, tmp_path):
    if form == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    network, card = network_and_card(name)
    path = tmp_path / f"model{FORMATS[form].suffix}"
    write_export(form, Classifier(fold_batch_norms(network), card.transform), card, path)
    runner, stored = open_export(form, path)
    assert stored == card
    norms = [module for module in network.modules() if isinstance(module, BatchNorm2d)]
    assert all(norm.running_mean.abs().max() > 0 and norm.running_var.min() != 1 for norm in norms)

    def reference(pixels):
        with torch.inference_mode():
            return network(card.transform(torch.from_numpy(pixels))).numpy()

    channels, height, width = card.transform.shape
    proof = compare(runner, reference, sample_pixels(height, width, channels))
    assert proof.batches == (1, 2, 7)
    assert proof.largest_difference <= 1e-4 and proof.same_answers


@needs_onnx
@pytest.mark.parametrize("form", ["onnx", "pt2", SLOW_AOTI])
def test_an_export_answers_every_test_image_as_the_run_does(form, exported, run_folder):
    if form == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    trained = load_trained(choose_checkpoint(run_folder))
    runner, card = open_export(form, exported(form).path)
    reference = reference_predictor(trained)
    assert card == metadata_of(trained)
    total = 0
    for pixels, _ in iter_test_batches(open_run_data(trained, SilentConsole())):
        assert (runner(pixels).argmax(1) == reference(pixels).argmax(1)).all()
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
def test_int8_stays_near_the_network(exported, run_folder, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    report = export.export(run_folder, "onnx", SilentConsole(), output=tmp_path / "small.onnx", int8=True)
    assert report.test_samples == 297
    assert abs(report.accuracy - report.int8_accuracy) <= 3 / 297
    whole = exported("onnx")
    assert report.bytes < whole.bytes / 2
    assert open_export("onnx", report.path)[1] == open_export("onnx", whole.path)[1]


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "efficientnet-cifar"])
def test_every_format_of_a_deep_network_answers_all_digits_alike(name, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    session.train(digits_config(tmp_path / "run", model=name, report=False), SilentConsole())
    trained = load_trained(choose_checkpoint(tmp_path / "run"))
    runners = [reference_predictor(trained)]
    for form in ("onnx", "pt2", "aoti"):
        report = export.export(tmp_path / "run", form, SilentConsole())
        assert report.largest_difference <= 1e-4
        runners.append(open_export(form, report.path)[0])
    total = 0
    for pixels, _ in iter_test_batches(open_run_data(trained, SilentConsole())):
        first, *others = (runner(pixels).argmax(1) for runner in runners)
        assert all((first == other).all() for other in others)
        total += len(pixels)
    assert total == 297


def test_a_graph_has_no_batch_norm_left(run_folder):
    trained = load_trained(choose_checkpoint(run_folder))
    assert count_batch_norms(trained.network) == 1
    assert count_batch_norms(export.classifier_of(trained, "pt2")) == 0
    assert count_batch_norms(export.classifier_of(trained, "safetensors")) == 1


def test_weights_come_back_bit_for_bit(run_folder, tmp_path):
    report = export.export(run_folder, "safetensors", SilentConsole(), output=tmp_path / "weights.safetensors")
    weights, card = read_weights(report.path)
    own = load_trained(choose_checkpoint(run_folder)).network.state_dict()
    assert set(weights) == set(own) and all(torch.equal(weights[name], own[name]) for name in own)
    assert card.classes == tuple("0123456789")


def test_the_verb_exports_into_the_run_folder(run_folder, capsys):
    assert dispatch(["export", str(run_folder), "--format", "pt2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["path"] == str(run_folder.resolve() / "model.pt2")
    assert report["batches"] == [1, 2, 7] and report["largest_difference"] <= 1e-4
    with zipfile.ZipFile(report["path"]) as archive:
        assert any(name.endswith("convolve.json") for name in archive.namelist())


def test_a_wrong_export_is_refused():
    reference = lambda pixels: np.full((len(pixels), 3), 5, np.float32)  # noqa: E731
    wrong = lambda pixels: np.full((len(pixels), 3), 5.05, np.float32)  # noqa: E731
    with pytest.raises(ConvolveError, match="differ from the network's by 0.01 of the largest"):
        require_equal(compare(wrong, reference, sample_pixels(4, 4, 1)), "model.onnx")
    with pytest.raises(ConvolveError, match="shape"):
        compare(lambda pixels: np.zeros((2, 3), np.float32), reference, sample_pixels(4, 4, 1))


def test_wrong_orders_are_one_line(run_folder, tmp_path):
    with pytest.raises(ConfigError, match="--format pt3: no such format; did you mean pt2"):
        export.export(run_folder, "pt3", SilentConsole())
    with pytest.raises(ConfigError, match="a package of machine code must end in .pt2"):
        export.export(run_folder, "aoti", SilentConsole(), output=tmp_path / "model.aoti")
    with pytest.raises(ConfigError, match="eight-bit files are ONNX"):
        export.export(run_folder, "pt2", SilentConsole(), int8=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConvolveError, match="cannot be written"):
        export.export(run_folder, "safetensors", SilentConsole(), output=tmp_path / "file" / "x.safetensors")


def test_a_file_without_a_card_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(CheckpointError, match="has no card of convolve"):
        read_weights(tmp_path / "plain.safetensors")
    with pytest.raises(CheckpointError, match="its card cannot be read"):
        ModelMetadata.from_json("{}", "x")


def test_pixels_survive_the_way_through_a_transform():
    pixels = np.random.default_rng(1).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    transform = Transform(6, 5, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    assert (to_pixels(transform(torch.from_numpy(pixels)), transform) == pixels).all()
