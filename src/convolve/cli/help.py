"""Help of a command: everyday options and examples first, the rest by topic (`--help TOPIC`, `--help all`)."""

import argparse
import shutil
from collections.abc import Sequence
from typing import Any

from convolve.config.schema import SECTIONS
from convolve.errors import ConfigError, suggest

EVERYDAY = (
    "config",
    "data_dir",
    "model",
    "weights",
    "image_size",
    "epochs",
    "minutes",
    "patience",
    "batch_size",
    "optimizer",
    "learning_rate",
    "lr_schedule",
    "warmup_epochs",
    "weight_decay",
    "augment",
    "precision",
    "device",
    "workers",
    "seed",
    "run_dir",
)
"""Options in the help of a command that trains, in order."""
ALL = "all"
_WIDTH = 100


class HelpFormatter(argparse.HelpFormatter):
    """Formats help for the width of the terminal, at most 100 columns."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(prog, max_help_position=30, width=max(40, min(columns, _WIDTH) - 2))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Keep the lines of examples; fill everything else."""
        return text if "\n" in text else super()._fill_text(text, width, indent)


class HelpAction(argparse.Action):
    """`-h` and `--help`; with an optional topic once `accept_topics` was called."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS)
        self.help = "show this help"

    def accept_topics(self) -> None:
        """Show everyday options only, and the others by topic."""
        self.nargs, self.metavar, self.help = "?", "TOPIC", "show this help, or all options of a topic"

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        topic = ALL if self.nargs == 0 else values
        print(format_help(parser, topic if isinstance(topic, str) else None), end="")
        parser.exit()


def format_help(parser: argparse.ArgumentParser, topic: str | None) -> str:
    """Return the help of a command about one topic; None is the everyday options."""
    groups = {group.title or "": group for group in parser._action_groups}
    topics = [name for name in SECTIONS if name in groups]
    if topic == ALL:
        return parser.format_help()
    if topic is None:
        return _format_everyday(parser, groups, topics)
    if topic not in topics:
        raise ConfigError(f"{parser.prog} --help {topic}: unknown topic; {suggest(topic, [*topics, ALL])}")
    formatter = parser._get_formatter()
    _add_group(formatter, topic, groups[topic].description, groups[topic]._group_actions)
    return formatter.format_help()


def _format_everyday(
    parser: argparse.ArgumentParser, groups: dict[str, argparse._ArgumentGroup], topics: Sequence[str]
) -> str:
    shown = {action.dest: action for action in parser._actions}
    everyday = [shown[name] for name in EVERYDAY if name in shown]
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage or "%(prog)s [--option value ...]", parser._actions, [], prefix="usage: ")
    formatter.add_text(parser.description)
    for title, group in groups.items():
        if title not in topics:
            rest = [action for action in group._group_actions if action not in everyday]
            _add_group(formatter, title, group.description, rest)
    _add_group(formatter, "everyday options", None, everyday)
    formatter.add_text(f"More options by topic: {parser.prog} --help TOPIC, one of {', '.join(topics)} or {ALL}.")
    formatter.add_text(parser.epilog)
    return formatter.format_help()


def _add_group(
    formatter: argparse.HelpFormatter, title: str, description: str | None, actions: Sequence[argparse.Action]
) -> None:
    if any(action.help is not argparse.SUPPRESS for action in actions):
        formatter.start_section(title)
        formatter.add_text(description)
        formatter.add_arguments(actions)
        formatter.end_section()
