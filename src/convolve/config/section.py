"""What a group of knobs is."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


def normalize_choice(others: Mapping[str, str], value: Any) -> Any:
    """Names are written in small letters with dashes; those that other systems have for the same thing are known."""
    return others.get(value, value.lower().replace("_", "-")) if isinstance(value, str) else value


class Section(BaseModel):
    """A group of knobs; unknown names are errors and values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    title: ClassVar[str]
