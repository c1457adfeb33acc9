"""Code that users bring: registries of names, attributes of packages (`package:attribute`), and plugin files.

A name comes from convolve, from a decorator in a plugin file, or from an entry point of an installed package. A name
that is offered twice is an error.

Code runs only if the user named it, on the command line or in a Python call, or installed it. `import_attribute`
imports a `package:attribute` only after `trust`, which commands call for what was typed. So a run folder or config file
of someone else can name code, but never makes convolve import it. A plugin file is executed once per process.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from convolve.errors import ConfigError, describe, suggest
from convolve.files import file_sha256

AnyT = TypeVar("AnyT")
_PREFIX = "convolve_plugin_"
_OPTIONS = {"augmentation": "augment", "metric": "metrics", "callback": "callbacks"}


@dataclass
class Registry:
    """What users registered under names, for one kind of plugin. Built-in names are passed to `find` and `names`."""

    kind: str
    _registered: dict[str, tuple[object, str]] = field(default_factory=dict)

    @property
    def option(self) -> str:
        """Option that names one: `--optimizer` on the command line, `optimizer=` in Python."""
        return _OPTIONS.get(self.kind, self.kind)

    @property
    def group(self) -> str:
        """Entry-point group of this kind."""
        return {"loss": "convolve.losses"}.get(self.kind, f"convolve.{self.kind}s")

    def register(self, name: str, value: AnyT, origin: str) -> AnyT:
        """Offer a value under a name; the same one may be offered again by the same origin."""
        if ":" in name or not name.strip() or name != name.strip():
            raise ConfigError(f"{self.kind} '{name}': not a name; use letters, digits and dashes")
        known = self._registered.get(name)
        if known is not None and known[1] != origin:
            raise ConfigError(f"{self.kind} {name}: offered more than once ({known[1]}, {origin}); rename one of them")
        self._registered[name] = (value, origin)
        return value

    def decorator(self, name: str) -> Callable[[AnyT], AnyT]:
        """Return a decorator that registers a function or class under a name."""

        def add(value: AnyT) -> AnyT:
            return self.register(name, value, origin_of(value))

        return add

    def names(self) -> list[str]:
        """Return all names that plugins offer, sorted."""
        return sorted({*self._registered, *(entry.name for entry in self._entries())})

    def find(self, name: str, builtin: object | None = None) -> object | None:
        """Return what a name stands for: a built-in value, a registered one or an entry point; None if unknown."""
        entries = [entry for entry in self._entries() if entry.name == name]
        registered = self._registered.get(name)
        owners = ["convolve"] * (builtin is not None) + ([registered[1]] if registered else [])
        owners += [entry.dist.name if entry.dist else entry.value for entry in entries]
        if len(owners) > 1:
            remedy = "rename one of them" if registered else "uninstall all but one"
            raise ConfigError(f"{self.kind} {name}: offered more than once ({', '.join(owners)}); {remedy}")
        if entries:
            return self._load(entries[0])
        return builtin if registered is None else registered[0]

    def resolve(self, name: str, built_in: Mapping[str, object] = MappingProxyType({})) -> Any:
        """Return what a name or a trusted `package:attribute` stands for, or raise an error."""
        if ":" in name:
            return import_attribute(self.kind, name, self.option)
        found = self.find(name, built_in.get(name))
        if found is None:
            known = {*built_in, *self.names()}
            register = f"register it with @convolve.{self.group[9:]}.register in a file of --plugin"
            raise ConfigError(f"{self.kind} {name}: unknown name; {suggest(name, known) if known else register}")
        return found

    def _entries(self) -> EntryPoints:
        return _read_entry_points(self.group, tuple(sys.path))

    def _load(self, entry: EntryPoint) -> object:
        try:
            return entry.load()
        except Exception as error:
            problem = f"cannot import {entry.value} ({error})"
            raise ConfigError(f"{self.kind} {entry.name}: {problem}; fix or uninstall the package") from error


@cache
def _read_entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of all packages in the folders of a path. Reading them takes a tenth of a short run."""
    return entry_points(group=group)


MODELS = Registry("model")
DATASETS = Registry("dataset")
LOSSES = Registry("loss")
METRICS = Registry("metric")
OPTIMIZERS = Registry("optimizer")
AUGMENTATIONS = Registry("augmentation")
CALLBACKS = Registry("callback")
REGISTRIES = (MODELS, DATASETS, LOSSES, METRICS, OPTIMIZERS, AUGMENTATIONS, CALLBACKS)

_trusted: set[str] = set()
_files: dict[Path, str] = {}


def origin_of(value: object) -> str:
    """Return where a class or function was defined, for messages."""
    module = str(getattr(value, "__module__", type(value).__module__))
    return f"{module.removeprefix(_PREFIX)}.{getattr(value, '__qualname__', type(value).__name__)}"


def name_of(value: object) -> str:
    """Return the name that a run records for an object of the user's code: `module:function`, or that of its class."""
    inner = getattr(value, "func", value)  # of functools.partial
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}:{named.__qualname__}"


def trust(name: str) -> None:
    """Allow a `package:attribute` to be imported, because the user typed it."""
    _trusted.add(name)


def import_attribute(kind: str, name: str, option: str | None = None) -> Any:
    """Return an attribute of a package; the name must be trusted. `option` is that of the command line [the kind]."""
    option = option or kind
    if name not in _trusted:
        raise ConfigError(
            f"{kind} {name}: code named in a file is never imported; name it again with --{option} {name} or {option}="
        )
    package, _, attribute = name.partition(":")
    # The command's script folder is on the path, but not the current folder. At the end, it shadows nothing.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        value: Any = importlib.import_module(package)
    except Exception as error:
        raise ConfigError(
            f"--{option} {name}: cannot import {package} ({describe(error)}); fix or install it"
        ) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            known = [each for each in dir(value) if not each.startswith("_")]
            raise ConfigError(f"--{option} {name}: {package} has no attribute '{part}'; {suggest(part, known)}")
        value = getattr(value, part)
    return value


def load_file(path: Path) -> None:
    """Execute a plugin file, whose decorators register names; a file that was executed already is skipped."""
    target = path.resolve()
    if target in _files:
        return
    if not target.is_file():
        raise ConfigError(f"--plugin {path}: no such file; give a Python file")
    digest, name = file_sha256(target), f"{_PREFIX}{target.stem}"
    spec = importlib.util.spec_from_file_location(name, target)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--plugin {path}: not a Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"--plugin {path}: cannot be executed ({describe(error)}); fix the file") from error
    _files[target] = digest


@dataclass(frozen=True)
class LoadedCode:
    """The user's code of this process, for the other processes of its run: trusted names, files, and modules."""

    trusted: tuple[str, ...]
    files: tuple[Path, ...]
    modules: tuple[str, ...]

    def load(self) -> None:
        """Trust, execute and import the same code in this process."""
        _trusted.update(self.trusted)
        for path in self.files:
            load_file(path)
        for module in self.modules:
            importlib.import_module(module)


def loaded_code() -> LoadedCode:
    """Return the user's code of this process. Names that were registered in the main program are not included."""
    values = [value for registry in REGISTRIES for value, _ in registry._registered.values()]
    makers = [getattr(value, "maker", value) for value in values]
    modules = {str(getattr(maker, "__module__", type(maker).__module__)) for maker in makers}
    importable = {name for name in modules if not name.startswith((_PREFIX, "convolve.")) and name != "__main__"}
    return LoadedCode(tuple(sorted(_trusted)), tuple(_files), tuple(sorted(importable)))


def loaded_files() -> dict[str, str]:
    """Return the plugin files of this process and their sha256, by file name."""
    return {path.name: digest for path, digest in _files.items()}
