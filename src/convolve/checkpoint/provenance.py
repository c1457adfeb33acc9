"""Where the weights that training started from were published. Imports no torch: exported files contain it too."""

from typing import Any

from convolve.errors import to_one_line

_KEYS = ("name", "source", "license", "sha256")


def read_provenance(stored: Any) -> dict[str, str | None] | None:
    """Return the entry that `WeightsFile.to_json` made; None for anything else, since files may come from others."""
    if not isinstance(stored, dict) or not all(isinstance(stored.get(key), str | None) for key in _KEYS):
        return None
    return {key: None if stored.get(key) is None else to_one_line(stored[key])[:500] for key in _KEYS}
