"""The migration pages are correct: options are translated as in their tables, and commands run at reduced size.

A table whose second heading is a command of convolve is about options: the old ones are in the first column, ours in
the second, or "not offered" with the reason in the third.
"""

import re

import pytest

from convolve.cli.main import COMMANDS, dispatch
from convolve.compat.options import translate
from convolve.compat.programs import PROGRAMS, translate_program
from convolve.errors import ConfigError
from documents import ROOT, commands, fill_desk, run_command, tables
from reduction import reduced

PAGES = sorted((ROOT / "docs" / "migrating").glob("*-*.md"))
NAMED = {
    line.split(":")[0]: line.split(":")[1].split()
    for line in (ROOT / "tests" / "fixtures" / "original-options.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
}
VERB = re.compile(r"`convolve (\w+)`")
CODE = re.compile(r"`([^`]+)`")
WITH_TOPICS = ("train", "align", "plan")
PARTS = {"bench": ["infer", "--help", "all"]}


def rows(page):
    """Every (command, old option with a value, our cell, reason cell) in the option tables of a page."""
    for header, lines in tables(page):
        match = VERB.fullmatch(header[1])
        for old, ours, reason in lines if match else ():
            for option in CODE.findall(old):
                yield match[1], option, ours, reason


def translated(command, option):
    """What typing an old option comes to; a value that the page does not give is 1."""
    name, *values = option.split()
    words = [name, *(values or ["1"])]
    if command in PROGRAMS:
        return translate_program(command, words)
    # With a named config, no defaults of an application are added.
    return translate(["--config", "lenet-mnist", *words])[2:]


def flags_of(command, capsys):
    """Every flag that the help of a command shows."""
    with pytest.raises(SystemExit):
        dispatch([command, *PARTS.get(command, ["--help", "all"] if command in WITH_TOPICS else ["--help"])])
    return set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", capsys.readouterr().out))


CASES = [(page.stem, *row) for page in PAGES for row in rows(page)]
NAMES = [f"{page}-{command}-{option.split()[0].lstrip('-')}" for page, command, option, _, _ in CASES]


@pytest.mark.parametrize(("page", "command", "option", "ours", "reason"), CASES, ids=NAMES)
def test_an_option_of_a_table_is_translated_as_its_row_documents(page, command, option, ours, reason):
    if ours == "not offered":
        with pytest.raises(ConfigError) as refusal:
            translated(command, option)
        assert str(refusal.value).partition(": ")[2].replace("`", "") == reason.replace("`", "")
    elif option.split()[0] != "-h":
        found = {word for word in translated(command, option) if re.match(r"--?[A-Za-z]", word)}
        assert found <= set(CODE.findall(ours))
        assert found or not any(word.startswith("-") for word in CODE.findall(ours))


@pytest.mark.parametrize("command", sorted({command for _, command, *_ in CASES} & set(COMMANDS)))
def test_every_flag_that_a_table_offers_exists(command, capsys):
    offered = {word for _, own, _, ours, _ in CASES if own == command for word in CODE.findall(ours) if word[0] == "-"}
    assert offered <= flags_of(command, capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_every_option_of_its_original(page):
    covered = {option.split()[0].lstrip("-").replace("_", "-") for _, option, _, _ in rows(page)}
    assert [name for name in NAMED[page.stem] if name.replace("_", "-") not in covered] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_at_reduced_size(page, tmp_path, monkeypatch):
    fill_desk(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for words in commands(page):
        run_command(reduced(words), page.stem)
