"""Core ML packages are written and read back. They run on Apple's systems only, so none is executed."""

import shutil

import pytest

from convolve.checkpoint.store import choose_checkpoint
from convolve.cli.main import dispatch
from convolve.errors import CheckpointError, ConfigError, ConvolveError
from convolve.export.export import export
from convolve.export.reference import export_module
from convolve.inference import coreml
from convolve.inference.formats import open_export
from convolve.inference.metadata import metadata_of
from convolve.loggers.base import SilentConsole
from convolve.runs.load import load_trained

pytest.importorskip("coremltools", reason="the extra 'coreml' is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def package(digits_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "digits.mlpackage"
    return export(digits_run, "coreml", SilentConsole(), output=path)


def test_a_package_contains_the_metadata_and_the_weights_bit_for_bit(package, digits_run):
    trained = load_trained(choose_checkpoint(digits_run))
    assert not package.executed and package.batches == ()
    assert package.bytes == sum(path.stat().st_size for path in package.path.rglob("*") if path.is_file())
    assert coreml.read_coreml(package.path) == metadata_of(trained)
    module = export_module(trained, "coreml")
    assert coreml.has_weights(package.path, module)
    weights = next(tensor for tensor in module.state_dict().values() if tensor.numel() >= coreml.MIN_WEIGHTS)
    weights.view(-1)[0] += 1
    assert not coreml.has_weights(package.path, module)


def test_a_package_is_not_executed(package):
    with pytest.raises(CheckpointError, match=r"digits\.mlpackage: Core ML packages run on Apple's systems only"):
        open_export("coreml", package.path)


def test_the_command_replaces_a_package_and_says_that_it_was_not_executed(digits_run, tmp_path, capsys):
    target = tmp_path / "model.mlpackage"
    (target / "old").mkdir(parents=True)
    assert dispatch(["export", str(digits_run), "--format", "coreml", "--output", str(target)]) == 0
    assert "bit for bit; not executed, Core ML runs on Apple's systems only" in capsys.readouterr().out
    assert not (target / "old").exists() and [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_package_that_differs_is_not_written(digits_run, tmp_path, monkeypatch):
    from convolve.export import export as module

    monkeypatch.setattr(module, "has_weights", lambda *given: False)
    target = tmp_path / "model.mlpackage"
    (target / "old").mkdir(parents=True)
    with pytest.raises(ConvolveError, match=r"model\.mlpackage: the package read back differs from the model"):
        export(digits_run, "coreml", SilentConsole(), output=target)
    assert [path.name for path in tmp_path.rglob("*")] == [target.name, "old"]


def test_wrong_targets_and_damaged_packages_are_one_line(package, digits_run, tmp_path):
    with pytest.raises(ConfigError, match="Core ML reads coreml files only if they end in .mlpackage; rename it"):
        export(digits_run, "coreml", SilentConsole(), output=tmp_path / "model.coreml")
    (tmp_path / "file.mlpackage").touch()
    with pytest.raises(ConvolveError, match="exists and is not a folder; choose another --output"):
        export(digits_run, "coreml", SilentConsole(), output=tmp_path / "file.mlpackage")
    damaged = tmp_path / "digits.mlpackage"
    shutil.copytree(package.path, damaged)
    (damaged / "Manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"^[^\n]*digits\.mlpackage: not a readable Core ML package [^\n]*$"):
        coreml.read_coreml(damaged)
