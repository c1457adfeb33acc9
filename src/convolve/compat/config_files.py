"""Config files: ours, and `configs.yml` of Graphcore's applications, with their keys and defaults.

A config whose keys include those of an application (`normalise_input`, `half_partial`) is translated like its command
line and gets that application's defaults. Keys that have no use here are named in a notice when the config is used. A
config with an error does not affect the others in its file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin

from convolve.compat.applications import TORCH_SPELLINGS, tensorflow_defaults
from convolve.compat.combinations import split_options
from convolve.compat.options import RENAMED, REPLACED, translate
from convolve.compat.refused import REFUSED
from convolve.config import loading
from convolve.config.loading import METADATA_KEYS, NamedConfig, Resolved, field_name, read_entry
from convolve.config.schema import SECTION_OF, fields
from convolve.config.section import normalize_choice
from convolve.config.spelling import canonical
from convolve.config.yaml_text import read_yaml
from convolve.errors import ConfigError

_LISTS = {name for _, name, info in fields() if get_origin(info.annotation) is tuple}


def load_entries(path: Path | None) -> dict[str, NamedConfig]:
    """Return the built-in configs and those of a file, which take precedence."""
    bodies = {} if path is None else read_yaml(path, aliases=True)
    return {**loading.shipped(), **{name: _load_entry(name, body, str(path)) for name, body in bodies.items()}}


def resolve(name: str | None, path: Path | None = None, given: Mapping[str, Any] | None = None) -> Resolved:
    """Return the checked config of a name (or none) with these options on top."""
    return loading.resolve_entry(load_entries(path), name, given)


def _load_entry(name: str, body: Any, origin: str) -> NamedConfig:
    try:
        if not isinstance(body, dict):
            return read_entry(name, body, origin)
        translated, notices = translate_body(body)
        return read_entry(name, translated, origin, tuple(f"{origin}, {name}: {line}" for line in notices))
    except ConfigError as error:
        where = f"{origin}, {name}"
        problem = str(error) if str(error).startswith(where) else f"{where}: {error}"
        return NamedConfig(name, origin, {}, problem=problem)


def translate_body(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a config in our keys, and notices; a config without keys of an application is unchanged."""
    about = {key: value for key, value in body.items() if key in METADATA_KEYS}
    keys = {canonical(str(key).replace("_", "-")): value for key, value in body.items() if key not in about}
    if not any(_is_foreign(key) for key in keys):
        return dict(body), []
    unused = sorted(key for key in keys if key in REFUSED)
    words = [word for key, value in keys.items() if key not in REFUSED for word in _as_words(key, value)]
    notices: list[str] = []
    values = _as_values(translate(words, notify=notices.append))
    if not TORCH_SPELLINGS & set(keys):
        optimizer = normalize_choice({"RMSprop": "rmsprop-tf"}, values.get("optimizer", "sgd"))
        values = _without_excluded(tensorflow_defaults({**values, "optimizer": optimizer}), values)
        notices.append("the defaults of Graphcore's TensorFlow application apply")
    if unused:
        notices.append(f"no use here for {', '.join(unused)}; docs/migrating has the reasons")
    return {**about, **values}, notices


def _is_foreign(key: str) -> bool:
    ours = key.replace("-", "_").removeprefix("no_") in SECTION_OF
    return not ours and (
        key in RENAMED or key in REPLACED or key in REFUSED or key in TORCH_SPELLINGS or key in _NEGATED
    )


# Switches that the original declares as negative flags and stores under their positive names.
_NEGATED = {"validation": "no-validation", "dataset-cache": "no-dataset-cache"}


def _as_words(key: str, value: Any) -> list[str]:
    """Return a key and its value as typed on a command line. A false switch is omitted if that means the same."""
    if key in _NEGATED and isinstance(value, bool):
        return [] if value else [f"--{_NEGATED[key]}"]
    if value is True:
        return [f"--{key}"]
    if value is False:
        ours = RENAMED.get(key, key)
        return [f"--no-{ours}"] if field_name(ours) in SECTION_OF else []
    if value is None or value == []:
        return []
    return [f"--{key}", *(str(item) for item in (value if isinstance(value, list) else [value]))]


def _as_values(words: list[str]) -> dict[str, Any]:
    """Return options of a translated command line by field."""
    values: dict[str, Any] = {}
    for flag, items in split_options(words)[1:]:
        name = field_name(flag or "")
        if name not in SECTION_OF and name.startswith("no_") and not items:
            values[name[3:]] = False
        else:
            values[name] = items if name in _LISTS else items[0] if items else True
    return values


def _without_excluded(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return values over defaults; a value removes the default that it excludes."""
    excluded = {
        pair[1 - place] for pair in loading.EXCLUSIVE for place in (0, 1) if values.get(pair[place]) is not None
    }
    return {**{name: value for name, value in defaults.items() if name not in excluded}, **values}
