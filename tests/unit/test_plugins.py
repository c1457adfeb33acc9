"""Names, `package:attribute` and plugin files: what is loaded, and what is never imported."""

import sys
from importlib.abc import MetaPathFinder

import pytest

from convolve import plugins
from convolve.cli.main import dispatch
from convolve.errors import ConfigError, ConvolveError
from convolve.plugins import Registry

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.fc = nn.Linear(784, num_classes)

    def forward(self, x):
        return self.fc(x.flatten(1))


def broken(width):
    return nn.Linear(width, 10)


NUMBER = 5
"""
QUICK = ["--dataset", "digits", "--iterations", "2", "--batch-size", "8", "--validation-mode", "none", "--no-report"]


class ImportCounter(MetaPathFinder):
    """Counts attempts to import a package."""

    def __init__(self, package):
        self.package, self.count = package, 0

    def find_spec(self, name, path=None, target=None):
        self.count += name.partition(".")[0] == self.package
        return


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a package `own_nets`."""
    (tmp_path / "own_nets.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(plugins, "_trusted", set())
    monkeypatch.setattr(plugins, "_files", {})
    for registry in (plugins.MODELS, plugins.DATASETS):
        monkeypatch.setattr(registry, "_registered", {})
    yield tmp_path
    sys.modules.pop("own_nets", None)


def test_a_typed_package_is_imported_and_a_run_that_names_it_is_not(folder, monkeypatch):
    assert dispatch(["train", "--model", "own_nets:Net", *QUICK, "--run-dir", "run"]) == 0
    sys.modules.pop("own_nets")
    monkeypatch.setattr(plugins, "_trusted", set())
    counter = ImportCounter("own_nets")
    monkeypatch.setattr(sys, "meta_path", [counter, *sys.meta_path])
    line = "own_nets:Net: code named in a file is never imported; name it again with --model own_nets:Net"
    for command in (["restore", "run", "--iterations", "3"], ["validate", "run"], ["export", "run", "--format", "pt2"]):
        with pytest.raises(ConvolveError, match=line):
            dispatch(command)
    assert counter.count == 0 and "own_nets" not in sys.modules
    assert dispatch(["restore", "run", "--iterations", "3", "--model", "own_nets:Net"]) == 0
    assert counter.count > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_nets:Nat", "--model own_nets:Nat: own_nets has no attribute 'Nat'; did you mean Net"),
        ("other_nets:Net", "--model other_nets:Net: cannot import other_nets .ModuleNotFoundError"),
        ("own_nets:NUMBER", "model own_nets:NUMBER: is int; give an nn.Module, or a class or function"),
        ("own_nets:broken", "model own_nets:broken: argument 'width' has no default"),
    ],
)
def test_wrong_packages_are_reported_in_one_line(folder, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        dispatch(["train", "--model", name, *QUICK])
    assert "\n" not in str(caught.value)


def test_a_plugin_file_registers_names_and_a_run_needs_it_again(folder, monkeypatch):
    plugin = folder / "shapes.py"
    plugin.write_text(f"import convolve\n{NET}\nconvolve.models.register('shape-net')(Net)\n")
    assert dispatch(["train", "--plugin", "shapes.py", "--model", "shape-net", *QUICK, "--run-dir", "run"]) == 0
    monkeypatch.setattr(plugins, "_files", {})
    monkeypatch.setattr(plugins.MODELS, "_registered", {})
    with pytest.raises(ConfigError, match="model shape-net: unknown name; .* the name of a plugin needs --plugin"):
        dispatch(["restore", "run", "--iterations", "3"])
    assert dispatch(["restore", "run", "--iterations", "3", "--plugin", "shapes.py"]) == 0
    assert list(plugins.loaded_files()) == ["shapes.py"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "--plugin plug.py: no such file"),
        ("1 / 0", "--plugin plug.py: cannot be executed .ZeroDivisionError: division by zero.; fix the file"),
        ("import nothing_there", "--plugin plug.py: cannot be executed .ModuleNotFoundError"),
    ],
)
def test_wrong_plugin_files_are_reported_in_one_line(folder, text, message):
    if text is not None:
        (folder / "plug.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        dispatch(["train", "--plugin", "plug.py", *QUICK])


def test_a_name_that_is_offered_twice_is_an_error():
    registry = Registry("metric")
    registry.register("certain", abs, "one.certain")
    registry.register("certain", abs, "one.certain")
    with pytest.raises(
        ConfigError, match="metric certain: offered more than once .one.certain, other.certain.; rename"
    ):
        registry.register("certain", abs, "other.certain")
    with pytest.raises(ConfigError, match="metric certain: offered more than once .convolve, one.certain"):
        registry.find("certain", builtin=max)
    with pytest.raises(ConfigError, match="metric 'a:b': not a name"):
        registry.register("a:b", abs, "one")


def test_unknown_names_say_what_is_known():
    registry = Registry("loss")
    with pytest.raises(ConfigError, match="loss focal: unknown name; register it with @convolve.losses.register"):
        registry.resolve("focal")
    registry.register("focal", abs, "one.focal")
    with pytest.raises(ConfigError, match="loss facal: unknown name; did you mean focal"):
        registry.resolve("facal")
