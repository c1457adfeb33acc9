"""Parts that commands share: a parser with `--json`, flags generated from the schema, and the processes of a run."""

import argparse
import sys
import types
from collections.abc import Callable, Container, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from convolve import device, plugins
from convolve.checkpoint.weights_table import find_info
from convolve.cli.help import HelpAction, HelpFormatter
from convolve.compat.config_files import resolve
from convolve.compat.options import translate
from convolve.config import Config, ModelConfig
from convolve.config.defaults import default_config
from convolve.config.loading import flag_name
from convolve.config.model_options import COMMON_OPTIONS, FamilyOptions, family_of
from convolve.config.schema import SECTION_OF, SECTIONS, fields
from convolve.distributed.launch.local import run_attempts, start_processes
from convolve.distributed.topology import is_distributed
from convolve.errors import ConfigError, suggest

RUN_COMMANDS = ("restore", "validate", "predict", "export", "serve", "report", "average", "describe")
PLUGIN_COMMANDS = (*RUN_COMMANDS, "train", "find-lr", "sweep", "bench", "align", "plan")
PLUGIN_HELP = "Python file to execute first; its decorators register models and other parts (may be repeated)"
USER_OPTIONS = ("model", "optimizer", "augment")
CODE_OPTIONS = {"restore": ("optimizer", "augment"), "average": ("augment",)}
_LONG_CHOICES = 56
# Called with a parser before it parses.
ON_PARSE: ContextVar[Callable[["Parser"], object]] = ContextVar("on_parse", default=lambda parser: None)
RUN_MODEL_HELP = "code of the run's model, if it is yours: code named in a file is never imported"


class Parser(argparse.ArgumentParser):
    """Parser of one command. Has `--json`, raises ConfigError, and suggests the closest flag for an unknown one."""

    def __init__(self, command: str, description: str, **options: Any) -> None:
        super().__init__(
            prog=f"convolve {command}",
            description=description,
            allow_abbrev=False,
            formatter_class=HelpFormatter,
            add_help=False,
            **options,
        )
        self.help_action = HelpAction(("-h", "--help"), "help")
        self._add_action(self.help_action)
        self.add_argument("--json", action="store_true", help="print the result as a JSON object on the last line")
        name = command.partition(" ")[0]
        if name in PLUGIN_COMMANDS:
            self.add_argument("--plugin", type=Path, action="append", metavar="FILE.py", default=[], help=PLUGIN_HELP)
        if name in RUN_COMMANDS:
            self.add_argument("--model", metavar="PACKAGE:NAME", help=RUN_MODEL_HELP)
        for option in CODE_OPTIONS.get(name, ()):
            self.add_argument(
                f"--{option}", metavar="PACKAGE:NAME", help=f"code of the run's --{option}, if it is yours"
            )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all arguments."""
        ON_PARSE.get()(self)
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            known = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            if not flags:
                self.error(f"unexpected argument {unknown[0]}; omit it")
            self.error("; ".join(f"unknown option {flag}; {suggest(flag, known)}" for flag in flags))
        load_user_code(namespace)
        return namespace


def add_callbacks_flag(parser: Parser) -> None:
    """Add `--callbacks`."""
    text = "callbacks and loggers: names of plugins, or PACKAGE:NAME of your code (may be repeated)"
    parser.add_argument("--callbacks", metavar="NAME", action="append", default=[], help=text)


class _MetricsAction(argparse.Action):
    """Collects names of metrics; without a name, the option `metrics` is on."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values is None:
            namespace.metrics = True
        else:
            namespace.metric_names = [*namespace.metric_names, values]


def add_loss_flag(parser: Parser) -> None:
    """Add `--loss`."""
    text = "loss: name of a plugin, or PACKAGE:NAME of your code [cross-entropy]"
    parser.add_argument("--loss", metavar="NAME", help=text)


def add_metrics_flag(parser: argparse._ActionsContainer, *, switch: bool = False) -> None:
    """Add `--metrics NAME`; as a `switch`, also `--metrics` and `--no-metrics`, the option of the config."""
    text = "metrics: top5_accuracy, name of a plugin, or PACKAGE:NAME of your code (may be repeated)"
    options: dict[str, Any] = {"dest": "metric_names", "metavar": "NAME", "default": [], "help": text}
    if not switch:
        parser.add_argument("--metrics", action="append", **options)
        return
    options["help"] += "; --no-metrics computes neither loss nor accuracy during training"
    parser.add_argument("--metrics", action=_MetricsAction, nargs="?", **options)
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("--no-metrics", dest="metrics", action="store_const", const=False, **hidden)


def load_user_code(namespace: argparse.Namespace) -> None:
    """Execute the plugin files that were typed, and allow the code that was typed to be imported."""
    files = getattr(namespace, "plugin", [])
    if files:
        # Plugins import torch.
        device.prepare()
    for path in files:
        plugins.load_file(path)
    for option in USER_OPTIONS:
        name = getattr(namespace, option, None)
        if name is not None and ":" in name:
            plugins.trust(name)


def format_value(value: object) -> str:
    """Return a value as shown in help and tables; None is an empty string."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return " ".join(format_value(item) for item in value)
    return "" if value is None else str(value)


def _split_optional(annotation: Any) -> tuple[Any, bool]:
    """Return a type without `| None`, and whether None was allowed. Of several types, the first is returned."""
    if get_origin(annotation) in (Union, types.UnionType):
        parts = get_args(annotation)
        return next(part for part in parts if part is not type(None)), type(None) in parts
    return annotation, False


def _choices(kind: Any) -> tuple[str, ...]:
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def schema_choices() -> dict[str, tuple[str, ...]]:
    """Return the values of every config option that has a fixed set of them."""
    return {name: _choices(_split_optional(info.annotation)[0]) for _, name, info in fields()}


def _metavar(kind: Any) -> str:
    choices = "|".join(_choices(kind))
    if choices:
        return choices if len(choices) <= _LONG_CHOICES else "NAME"
    return {int: "N", float: "X", str: "NAME"}.get(kind, "PATH")


def _help(info: FieldInfo) -> str:
    text, default = (info.description or "").replace("%", "%%"), format_value(info.get_default())
    choices = _choices(_split_optional(info.annotation)[0])
    if len("|".join(choices)) > _LONG_CHOICES:
        text = f"{text}; one of {', '.join(choices)}"
    return f"{text} [{default}]" if default and not text.endswith("]") else text


def _family_help(family: type[FamilyOptions], name: str, info: FieldInfo) -> str:
    """Return the help of a family's option with its default, and the one for small images if that differs."""
    defaults = [getattr(family.read(ModelConfig(), small_images=small), name) for small in (False, True)]
    usual, small = (format_value(value) or "by size" for value in defaults)
    text = f"{usual}, {small} on small images" if small != usual else usual
    return f"{(info.description or '').replace('%', '%%')} [{text}]"


def model_in(argv: Sequence[str]) -> str | None:
    """Return the value of `--model` before parsing: `--model NAME --help` lists that model's options first."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        if word == "--model":
            return following
        if word.startswith("--model="):
            return word.partition("=")[2]
    return None


def add_config_flags(parser: Parser, model: str | None = None, *, named_metrics: bool = False) -> None:
    """Add all options of the schema by section, and `--config`. With `named_metrics`, `--metrics` also takes names.

    With a `model`, the options of its family come first, and those of other families are hidden.
    """
    parser.help_action.accept_topics()
    parser.add_argument("--config", metavar="NAME", help="named config to start from; list them: `convolve configs`")
    parser.add_argument("--config-path", type=Path, metavar="FILE", help="YAML file with your named configs")
    family = family_of(model) if model else None
    first = parser.add_argument_group(f"{family.family}: {family.sizes}") if family else None
    groups = {name: parser.add_argument_group(name, kind.__doc__) for name, kind in SECTIONS.items()}
    for section, name, info in fields():
        if named_metrics and name == "metrics":
            add_metrics_flag(groups[section], switch=True)
        elif family and first and name in family.names():
            _add_flag(first, name, info, _family_help(family, name, info))
        else:
            hidden = family and section == "model" and name not in COMMON_OPTIONS
            _add_flag(groups[section], name, info, argparse.SUPPRESS if hidden else _help(info))


def add_section_flags(parser: Parser, section: str) -> None:
    """Add the options of one section."""
    group = parser.add_argument_group(section, SECTIONS[section].__doc__)
    for name, info in SECTIONS[section].model_fields.items():
        _add_flag(group, name, info, _help(info))


def _add_flag(group: argparse._ArgumentGroup, name: str, info: FieldInfo, text: str) -> None:
    kind, _ = _split_optional(info.annotation)
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    flag = f"--{flag_name(name)}"
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif get_origin(kind) is tuple:
        group.add_argument(flag, nargs="+", metavar="X", **common)
    else:
        group.add_argument(flag, metavar=_metavar(kind), **common)


def add_engine_flag(parser: Parser, default: str) -> None:
    """Add `--engine`."""
    names = "auto (the fastest), torch (reproducible), onnxruntime, openvino or aoti"
    parser.add_argument("--engine", default=default, metavar="NAME", help=f"inference engine: {names} [{default}]")


def explicit_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the config options given on the command line. `none` unsets an optional value; lists may have commas."""
    annotations = {name: info.annotation for _, name, info in fields()}
    options = {}
    for name, value in vars(namespace).items():
        if name in SECTION_OF:
            _, optional = _split_optional(annotations[name])
            if isinstance(value, list):
                value = [item for word in value for item in str(word).split(",") if item]
            options[name] = None if optional and value == "none" else value
    return options


def translate_options(argv: Sequence[str], reserved: Container[str] = ()) -> list[str]:
    """Translate the options of other systems in a command line; print what is not obvious about it."""
    return translate(argv, reserved, _print_notice)


def _print_notice(line: str) -> None:
    """Print a line once, not in every rank."""
    if not is_distributed():
        print(f"convolve: {line}", file=sys.stderr, flush=True)


def read_config(namespace: argparse.Namespace, config: str | None = None, **overrides: Any) -> Config:
    """Return the config of the flags: `config` or the named one, else one of `--model` alone, else the default.

    Published weights select their model if neither a config nor a model is given.

    `overrides` replace options of the command line.
    """
    options = {**explicit_options(namespace), **overrides}
    named = config or namespace.config
    published = find_info(str(options.get("weights"))) if not named and "model" not in options else None
    if published is not None:
        options["model"] = published.model
    name, options = (named, options) if named else default_config(options)
    resolved = resolve(name, namespace.config_path, options)
    for line in resolved.notices:
        _print_notice(line)
    return resolved.config


def should_spawn(config: Config) -> bool:
    """Return whether this process must start the ranks of a run instead of being one of them."""
    return (config.parallel.processes > 1 or config.parallel.max_restarts > 0) and not is_distributed()


def spawn_ranks(argv: Sequence[str], config: Config) -> int:
    """Run a command in all ranks on this host, and again from the newest checkpoint up to --max-restarts times."""
    world = config.parallel.processes
    if not config.parallel.max_restarts:
        return start_processes(world, argv)
    if argv[0] == "train":
        argv = resumable(argv, config)
    return run_attempts(
        lambda _: start_processes(world, argv),
        config.parallel.max_restarts,
        lambda line: print(f"convolve: {line}", file=sys.stderr, flush=True),
    )


def resumable(argv: Sequence[str], config: Config) -> list[str]:
    """Return a `train` command that continues its run if it is started again. Its folder is created now."""
    from convolve.runs.folder import create_run_dir, has_started

    started = config.run.run_dir if config.run.resume and has_started(config) else None
    folder = started or create_run_dir(config.run, config.name)
    return [*argv, "--resume", "--run-dir", str(folder.absolute())]
