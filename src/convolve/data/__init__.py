"""Data sets: readers, augmentation, loaders, checks and preparation.

The public functions, such as `convolve.data.list` and `convolve.data.loader`, are in `api/data.py`.
"""

from convolve import lazy

__all__ = lazy.install(
    __name__,
    {
        "convolve.api.data": ("Feed", "check", "clean", "get", "list", "loader", "open", "prepare", "register"),
        "convolve.data.items": ("KeyedDataset", "MapDataset"),
    },
)
