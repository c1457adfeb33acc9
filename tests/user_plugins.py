"""Registered names and loaded plugin files of a test process."""

from convolve import plugins


def forget(monkeypatch):
    """Forget registered, trusted and loaded code, as a new process would."""
    monkeypatch.setattr(plugins, "_trusted", set())
    monkeypatch.setattr(plugins, "_files", {})
    for registry in plugins.REGISTRIES:
        monkeypatch.setattr(registry, "_registered", {})
