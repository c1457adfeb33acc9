"""Base class of the option sections."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


def normalize_choice(aliases: Mapping[str, str], value: Any) -> Any:
    """Return a choice in lower case with dashes, with names of other systems replaced."""
    return aliases.get(value, value.lower().replace("_", "-")) if isinstance(value, str) else value


class Section(BaseModel):
    """Group of options; unknown names are errors and values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())
