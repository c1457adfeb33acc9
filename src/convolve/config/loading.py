"""Named configs: read them from strict YAML, resolve `base:`, and add the options of the command line.

Layers, lowest first: defaults of the schema, each `base:` from the root down, the named config, the command line. A
later layer replaces single values. Options that exclude each other (`epochs` and `iterations`) do so across layers too:
setting one unsets the other in the layers below.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from convolve.config.effects import reject_ineffective
from convolve.config.rules import check
from convolve.config.schema import SECTION_OF, SECTIONS, Config
from convolve.config.spelling import canonical
from convolve.config.user_names import find_unknown_names
from convolve.config.yaml_text import MAX_ITEMS, parse_yaml, read_yaml
from convolve.errors import ConfigError, suggest
from convolve.files import open_run_file

COMMAND_LINE = "command line"

EXCLUSIVE = (
    ("epochs", "iterations"),
    ("ckpts_per_epoch", "epochs_per_ckpt"),
    ("learning_rate", "base_learning_rate_exponent"),
    ("rmsprop_decay", "rmsprop_base_decay_exp"),
    ("poly_lr_end_ratio", "abs_end_learning_rate"),
)

# Former names of options, in old runs and in configs of users.
RENAMED = {"init_path": "weights"}
# What runs did before an option existed, if that is not its default.
_BEFORE = {"split_rule": "name"}

_LARGEST_NUMBER = 2**64
METADATA_KEYS = ("base", "summary", "also", "published-on")


@dataclass(frozen=True)
class NamedConfig:
    """One named config as written in a file.

    `published_on` is the device model that its author ran it on. It does not change training; `plan` assumes it.
    `notices` are printed if the config is used, `problem` is an error that is raised then.
    """

    name: str
    origin: str
    values: Mapping[str, Any]
    base: str | None = None
    summary: str = ""
    also: tuple[str, ...] = ()
    published_on: str | None = None
    notices: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Resolved:
    """A complete config, and the origin of the value of each option."""

    config: Config
    origins: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def field_name(key: str) -> str:
    """Return the field of an option key: `batch-size` and `batch_size`, `optimiser` and `optimizer` are the same."""
    name = key.replace("-", "_")
    return name if name in SECTION_OF else RENAMED.get(name) or canonical(name)


def flag_name(name: str) -> str:
    """Return an option as written on the command line, without `--`."""
    return name.replace("_", "-")


def read_entry(name: str, body: Any, origin: str, notices: tuple[str, ...] = ()) -> NamedConfig:
    """Return the named config of a mapping in our keys."""
    if not isinstance(body, dict):
        raise ConfigError(f"{origin}, {name}: expected `option: value` lines")
    about = {key: body[key] for key in METADATA_KEYS if key in body}
    values = {field_name(str(key)): value for key, value in body.items() if key not in METADATA_KEYS}
    for key, value in values.items():
        _require_known(key, f"{origin}, {name}")
        _require_flat(key, value, f"{origin}, {name}")
    base, also = about.get("base"), about.get("also", [])
    if not isinstance(base, str | None):
        raise ConfigError(f"{origin}, {name}: `base: {base}`: must be the name of a config")
    if not isinstance(also, list):
        raise ConfigError(f"{origin}, {name}: `also: {also}`: must be a list of names, such as [one, other]")
    names = tuple(str(item) for item in also)
    summary = str(about.get("summary", ""))
    return NamedConfig(name, origin, values, base, summary, names, about.get("published-on"), notices)


def _require_known(key: str, origin: str) -> None:
    if key not in SECTION_OF:
        known = [flag_name(name) for name in SECTION_OF]
        raise ConfigError(f"{origin}: unknown option '{flag_name(key)}'; {suggest(flag_name(key), known)}")


def _require_flat(key: str, value: Any, origin: str) -> None:
    """Reject nested values, which no option has and which aliases could make huge."""
    nested = isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
    )
    if nested or (isinstance(value, list) and len(value) > MAX_ITEMS):
        raise ConfigError(f"{origin}: {flag_name(key)}: must be a value or a list of at most {MAX_ITEMS} values")


@cache
def shipped() -> dict[str, NamedConfig]:
    """Return the built-in configs by name, in the order of their files."""
    folder = resources.files("convolve.config").joinpath("configs")
    entries: dict[str, NamedConfig] = {}
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        if file.name.endswith(".yml"):
            for name, body in parse_yaml(file.read_text(encoding="utf-8"), file.name).items():
                entries[name] = read_entry(name, body, file.name)
    return entries


def load_entries(path: Path | None) -> dict[str, NamedConfig]:
    """Return the built-in configs and those of a file in our keys, which take precedence."""
    bodies = {} if path is None else read_yaml(path, aliases=True)
    return {**shipped(), **{name: read_entry(name, body, str(path)) for name, body in bodies.items()}}


def find_config(name: str, entries: Mapping[str, NamedConfig]) -> NamedConfig:
    """Return a config by its name or by its name in an original system."""
    entry = entries.get(name) or next((entry for entry in entries.values() if name in entry.also), None)
    if entry is not None:
        if entry.problem is not None:
            raise ConfigError(entry.problem)
        return entry
    raise ConfigError(f"unknown config '{name}'; {suggest(name, entries)}")


def _lineage(entry: NamedConfig, entries: Mapping[str, NamedConfig]) -> list[NamedConfig]:
    """Return the entry and its bases, root first."""
    lineage = [entry]
    while lineage[0].base is not None:
        base = find_config(lineage[0].base, entries)
        if base in lineage:
            raise ConfigError(f"{entry.origin}, {entry.name}: `base:` leads back to '{base.name}'; remove the cycle")
        lineage.insert(0, base)
    return lineage


def published_device(name: str) -> str | None:
    """Return the device model that a built-in config was published for, None for other configs."""
    if name not in shipped():
        return None
    lineage = _lineage(shipped()[name], shipped())
    return next((entry.published_on for entry in reversed(lineage) if entry.published_on is not None), None)


def _merge(layers: list[tuple[str, Mapping[str, Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        for one, other in EXCLUSIVE:
            if layer.get(one) is not None and layer.get(other) is not None:
                both = f"--{flag_name(one)} {layer[one]} with --{flag_name(other)} {layer[other]}"
                raise ConfigError(f"{both} ({origin}): exclude each other; omit one")
            for option, dropped in ((one, other), (other, one)):
                if layer.get(option) is not None:
                    values.pop(dropped, None)
                    origins.pop(dropped, None)
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    return values, origins


def resolve(name: str | None, path: Path | None = None, given: Mapping[str, Any] | None = None) -> Resolved:
    """Return the checked config of a name (or none) with these options on top; a file at `path` has our keys only."""
    return resolve_entry(load_entries(path), name, given)


def resolve_entry(entries: Mapping[str, NamedConfig], name: str | None, given: Mapping[str, Any] | None) -> Resolved:
    """Return the checked config of a name (or none) among these with these options on top."""
    notices: tuple[str, ...] = ()
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if name is not None:
        lineage = _lineage(find_config(name, entries), entries)
        layers = [(f"{entry.origin}: {entry.name}", entry.values) for entry in lineage]
        notices = tuple(line for entry in lineage for line in entry.notices)
        name = lineage[-1].name
    layers.append((COMMAND_LINE, given or {}))
    values, origins = _merge(layers)
    config = build(values, origins, name or "custom")
    for option, problem in find_unknown_names(config):
        raise ConfigError(f"{_subject(option, values[option], origins)}: {problem}")
    reject_ineffective(config, given or {})
    return Resolved(config, {option: origins.get(option, "default") for option in SECTION_OF}, notices)


def build(values: Mapping[str, Any], origins: Mapping[str, str] | None = None, name: str = "custom") -> Config:
    """Return a checked config of flat values; raise for the first broken rule."""
    config = _build_unchecked(values, origins or {}, name)
    check(config)
    return config


def read_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as values of their types, for example of the words of a command line."""
    values = _build_unchecked(options, {}, "options").values()
    return {field_name(key): values[field_name(key)] for key in options}


def _build_unchecked(values: Mapping[str, Any], origins: Mapping[str, str], name: str) -> Config:
    """Return a config whose values have the right types and ranges; rules about several options are not checked."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, value in values.items():
        option = field_name(key)
        _require_known(option, origins.get(key, "options"))
        if isinstance(value, int | float) and abs(value) >= _LARGEST_NUMBER:
            raise ConfigError(f"--{flag_name(option)} {value}: must be a number of at most 64 bits")
        sections[SECTION_OF[option]][option] = value
    try:
        checked: dict[str, Any] = {key: SECTIONS[key](**section) for key, section in sections.items()}
        return Config(name=name, **checked)
    except ValidationError as error:
        raise ConfigError(_first_error(error, origins)) from None


def read_config(source: str | Path, name: str | None, options: Mapping[str, Any]) -> Config:
    """Return a named config, or one of a file; see `Config.read`."""
    if isinstance(source, str):
        return resolve(source, None, options).config
    content = read_yaml(source)
    if not any(isinstance(value, dict) for value in content.values()):
        return _build_saved(content, str(source)).replace(**options)
    if name is None and len(content) > 1:
        raise ConfigError(f"{source}: has {len(content)} configs; name one of {', '.join(content)}")
    return resolve(name or next(iter(content)), source, options).config


def replace_options(config: Config, options: Mapping[str, Any]) -> Config:
    """Return a copy with these options changed, checked by every rule. An option unsets the one that it excludes."""
    values = config.values()
    for pair in EXCLUSIVE:
        for option, excluded in (pair, pair[::-1]):
            if options.get(option) is not None:
                values.pop(excluded, None)
    return build({**values, **options}, name=config.name)


def _first_error(error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors()[0]
    option, value = str(first["loc"][0]), first["input"]
    rule = first["msg"].replace("Input should be", "must be").replace("Value error, ", "")
    return f"{_subject(option, value, origins)}: {rule}"


def _subject(option: str, value: object, origins: Mapping[str, str]) -> str:
    """Return an option and its value as they were typed, or as they are in a file."""
    origin = origins.get(option)
    if origin is None or origin == COMMAND_LINE:
        return f"--{flag_name(option)} {value}"
    return f"{origin}: {flag_name(option)}: {value}"


def dump(config: Config) -> str:
    """Return a config as YAML text, which `parse` reads back."""
    values = config.values()
    lines = [f"name: {config.name}"]
    for section, kind in SECTIONS.items():
        lines += ["", f"# {section}: {(kind.__doc__ or '').strip()}"]
        options = {flag_name(name): values[name] for name in kind.model_fields}
        lines.append(yaml.safe_dump(options, sort_keys=False, allow_unicode=True).rstrip())
    return "\n".join(lines) + "\n"


def parse(text: str, origin: str) -> Config:
    """Return the config of a text written by `dump`."""
    return _build_saved(parse_yaml(text, origin), origin)


def read_saved(path: Path) -> Config:
    """Return the config of a file in a run folder, written by `dump`; links are rejected."""
    with suppress(OSError):
        open_run_file(path).close()
    return _build_saved(read_yaml(path), str(path))


def _build_saved(content: Mapping[str, Any], origin: str) -> Config:
    values = {field_name(key): value for key, value in content.items()}
    name = str(values.pop("name", "custom"))
    return build_stored(values, dict.fromkeys(values, origin), name)


def build_stored(values: Mapping[str, Any], origins: Mapping[str, str] | None = None, name: str = "custom") -> Config:
    """Return the config of a run; options that its version did not have keep what that version did."""
    stored = {**_BEFORE, **{field_name(key): value for key, value in values.items()}}
    if stored.get("dataset") is None and (stored.get("generated_data") or stored.get("synthetic_data")):
        stored["dataset"] = "mnist"  # what runs without a name had, with any model
    return build(stored, origins, name)


def json_schema() -> dict[str, Any]:
    """Return a JSON schema of config files, for editors."""
    options: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for kind in SECTIONS.values():
        schema = kind.model_json_schema()
        definitions.update(schema.get("$defs", {}))
        options.update({flag_name(name): body for name, body in schema["properties"].items()})
    about = {
        "base": {"type": "string", "description": "config to inherit from"},
        "summary": {"type": "string", "description": "one line about this config"},
        "also": {"type": "array", "items": {"type": "string"}, "description": "other names of this config"},
        "published-on": {"type": "string", "description": "device model that `plan` assumes"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "convolve configs",
        "type": "object",
        "additionalProperties": {"type": "object", "additionalProperties": False, "properties": {**about, **options}},
        **({"$defs": definitions} if definitions else {}),
    }
