"""Base class of the option sections."""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


def normalize_choice(aliases: Mapping[str, str], value: Any) -> Any:
    """Return a choice in lower case with dashes, with names of other systems replaced."""
    return aliases.get(value, value.lower().replace("_", "-")) if isinstance(value, str) else value


class Section(BaseModel):
    """Group of options; unknown names are errors and values cannot change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_choice(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept a choice as a number or as text: YAML reads 16.16 as a number, the command line has only text."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        literals = (part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal)
        return next((choice for part in literals for choice in get_args(part) if str(choice) == str(value)), value)
