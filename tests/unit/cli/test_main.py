"""The entry point: usage, aliases, and the exit code and message of each kind of error."""

import sys
from types import SimpleNamespace

import pytest

from convolve import __version__, errors
from convolve.cli.main import COMMANDS, dispatch, main


@pytest.fixture
def doctor(monkeypatch):
    """Replace the module of a command by a fake; return a function that sets what it does."""

    def set_run(run):
        monkeypatch.setitem(sys.modules, "convolve.cli.doctor", SimpleNamespace(run=run))

    return set_run


def exit_code(*words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code


def raising(error):
    def run(argv):
        raise error

    return run


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_the_usage_lists_every_command_with_its_summary(words, capsys):
    assert dispatch(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: convolve COMMAND [options]")
    assert [line.split(maxsplit=1) for line in lines[2 : 2 + len(COMMANDS)]] == [
        list(item) for item in COMMANDS.items()
    ]


def test_the_version_is_that_of_the_package(capsys):
    assert dispatch(["--version"]) == 0
    assert capsys.readouterr().out == f"convolve {__version__}\n"


def test_a_command_gets_its_arguments_and_sets_the_exit_code(doctor):
    received = []
    doctor(lambda argv: received.append(list(argv)) or 3)
    assert exit_code("doctor", "--json", "x") == 3
    assert received == [["--json", "x"]]


def test_debug_is_an_option_of_every_command_and_is_not_passed_on(doctor):
    received = []
    doctor(lambda argv: received.append(list(argv)) or 0)
    assert exit_code("doctor", "--debug", "x") == 0
    assert received == [["x"]]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ConfigError, 2),
        (errors.DeviceError, 2),
        (errors.DataError, 1),
        (errors.ImageTooLargeError, 1),
        (errors.CheckpointError, 1),
        (errors.DivergedError, 1),
        (errors.NumericsError, 1),
        (errors.ParallelError, 1),
        (errors.SandboxError, 1),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(doctor, capsys, kind, code):
    doctor(raising(kind("--option x: problem\nin two lines")))
    assert exit_code("doctor") == code
    assert capsys.readouterr().err == "convolve: --option x: problem\\nin two lines\n"


def test_a_missing_extra_names_the_command_that_installs_it(doctor, capsys):
    doctor(raising(errors.ExtraError("--wandb", "logs")))
    assert exit_code("doctor") == 2
    assert capsys.readouterr().err == (
        "convolve: --wandb needs the extra 'logs'; install it with: pip install 'convolve[logs]'\n"
    )


def test_a_table_is_printed_below_its_error(doctor, capsys):
    doctor(raising(errors.ConfigError("--shards 9: too many", "  block\n  conv1", subject="plan")))
    assert exit_code("doctor") == 2
    assert capsys.readouterr().err == "convolve: plan: --shards 9: too many\n  block\n  conv1\n"


def test_an_unexpected_exception_is_an_internal_error_in_one_line(doctor, capsys):
    doctor(raising(KeyError("a\nb")))
    assert exit_code("doctor") == 1
    assert capsys.readouterr().err == (
        "convolve: internal error: KeyError: 'a\\nb'; rerun with --debug and report it\n"
    )


@pytest.mark.parametrize("error", [errors.DataError("x"), KeyError("x")], ids=["expected", "unexpected"])
def test_debug_shows_the_traceback(doctor, error):
    doctor(raising(error))
    with pytest.raises(type(error)):
        main(["doctor", "--debug"])


def test_an_interrupt_and_a_closed_pipe_have_no_traceback(doctor, capsys):
    doctor(raising(KeyboardInterrupt()))
    assert exit_code("doctor") == 130
    assert capsys.readouterr().err == "convolve: stopped\n"
    doctor(raising(BrokenPipeError()))
    assert exit_code("doctor") == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("kind", "printed"), [(errors.ConfigError, False), (errors.DataError, True)], ids=["config", "data"]
)
def test_ranks_other_than_0_do_not_repeat_a_config_error(doctor, capsys, monkeypatch, kind, printed):
    monkeypatch.setenv("RANK", "1")
    doctor(raising(kind("problem")))
    assert exit_code("doctor") == kind.exit_code
    assert capsys.readouterr().err == ("convolve: problem\n" if printed else "")


@pytest.mark.parametrize(
    ("typed", "known", "expected"),
    [
        ("trian", ["train", "plan"], "did you mean train?"),
        ("zzz", ["b", "a", "a"], "known: a, b"),
        ("zzz", [f"n{index:02d}" for index in range(30)],
         "known: " + ", ".join(f"n{index:02d}" for index in range(24)) + " and 6 more"),
    ],
)  # fmt: skip
def test_an_unknown_name_comes_with_near_or_known_names(typed, known, expected):
    assert errors.suggest(typed, known) == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [("a\tb", "a\\tb"), ("\x1b[31mred", "\\x1b[31mred"), ("é 日本", "é 日本"), ("a\u2028b", "a\\u2028b")],
)
def test_a_message_cannot_break_a_line_or_control_a_terminal(text, line):
    assert errors.to_one_line(text) == line
