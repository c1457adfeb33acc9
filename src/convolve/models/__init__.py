"""Models as ordered lists of named blocks, the registry that finds them by name, and their summaries and timings.

Layers and initialization are in `layers`; loading weights, devices, number formats and distribution are elsewhere. The
public functions `convolve.models.list`, `create` and `describe` are in `api/models.py`.
"""

from convolve import lazy

__all__ = lazy.install(
    __name__,
    {
        "convolve.api.models": ("ModelInfo", "create", "describe", "list"),
        "convolve.models.adopt": ("Adopted", "adopt"),
        "convolve.models.registration": ("register",),
    },
)
