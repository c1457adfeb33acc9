"""Help: everyday options first, the others by topic."""

import re

import pytest

from convolve.cli.help import EVERYDAY
from convolve.cli.main import COMMANDS, dispatch
from convolve.config.schema import SECTIONS, fields
from convolve.errors import ConfigError


def read_help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        dispatch(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags(text: str) -> set[str]:
    return set(re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE))


def test_help_of_train_shows_the_twenty_everyday_options_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    text = read_help(capsys, "train", "--help")
    assert len(EVERYDAY) == 20
    shown = flags(text[text.index("everyday options:") :])
    assert shown == {f"--{name.replace('_', '-')}" for name in EVERYDAY}
    assert "\n  convolve train flowers " in text and "--help TOPIC" in text


def test_every_option_is_in_exactly_one_topic(capsys: pytest.CaptureFixture[str]) -> None:
    by_topic = [flags(read_help(capsys, "train", "--help", topic)) for topic in SECTIONS]
    everything = {f"--{name.replace('_', '-')}" for _, name, _ in fields()}
    assert set().union(*by_topic) == everything and sum(map(len, by_topic)) == len(everything)
    assert everything <= flags(read_help(capsys, "train", "--help", "all"))


@pytest.mark.parametrize("columns", ["80", "100", "200"])
def test_help_fits_the_terminal(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    topics = [["--help"], *(["--help", topic] for topic in (*SECTIONS, "all"))]
    for words in [["train", *topic] for topic in topics] + [[name, "--help"] for name in COMMANDS if name != "bench"]:
        for line in read_help(capsys, *words).splitlines():
            assert len(line) <= min(int(columns), 100), line


def test_an_unknown_topic_is_answered_with_the_topics() -> None:
    with pytest.raises(ConfigError, match=r"convolve train --help sched: unknown topic; did you mean schedule"):
        dispatch(["train", "--help", "sched"])


def test_commands_without_topics_show_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = read_help(capsys, "restore", "--help")
    assert "--epochs X" in text and "--replicas" in text and "TOPIC" not in text
