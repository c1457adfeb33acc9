"""Packages whose public names are loaded on first use (PEP 562).

A public name may also be the name of a submodule, such as the function `convolve.runs` and the package `convolve/runs`.
The function wins: importing a submodule never replaces a public name. Submodules stay importable by `from package.name
import ...`.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType


class LazyPackage(ModuleType):
    """A package with public names by the module that defines them. The home of a public submodule is empty."""

    _homes: dict[str, str]

    def __getattr__(self, name: str) -> object:
        home = self.__dict__.get("_homes", {}).get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name) if home else import_module(f"{self.__name__}.{name}")
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds each submodule in its package.
        if isinstance(value, ModuleType) and self.__dict__.get("_homes", {}).get(name):
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})


def install(package: str, modules: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()) -> list[str]:
    """Make the names of these modules, and some submodules, public in a package. Return them for `__all__`."""
    module = sys.modules[package]
    homes = {name: home for home, names in modules.items() for name in names} | dict.fromkeys(submodules, "")
    module.__dict__["_homes"] = homes
    module.__class__ = LazyPackage
    return sorted(homes)
