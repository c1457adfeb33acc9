import pytest

from convolve.cli.command import Parser, add_config_flags, asked_model, explicit_options, format_value


def parse(*arguments):
    parser = Parser(prog="convolve train")
    add_config_flags(parser, asked_model(arguments))
    return explicit_options(parser.parse(arguments))


def test_no_arguments_are_no_values():
    """`convolve train` alone is the first command that anybody types."""
    assert asked_model([]) is None
    assert parse() == {}


@pytest.mark.parametrize(
    "arguments", [["--model", "resnet18"], ["--model=resnet18"], ["--seed", "1", "--model", "resnet18"]]
)
def test_the_model_that_help_is_asked_for_is_found(arguments):
    assert asked_model(arguments) == "resnet18"


def test_only_what_was_given_counts():
    assert parse("--seed", "3", "--no-logs") == {"seed": "3", "logs": False}


def test_none_unsets_an_optional_value():
    assert parse("--keep-checkpoints", "none") == {"keep_checkpoints": None}


def test_lists_take_blanks_or_commas():
    assert parse("--learning-rate-schedule", "0.5,0.75") == parse("--learning-rate-schedule", "0.5", "0.75")


def test_numbers_and_switches_are_spelled_differently():
    assert [format_value(value) for value in (1, True, 0, False)] == ["1", "on", "0", "off"]


def test_lists_are_spelled_as_one_types_them_and_what_is_not_there_not_at_all():
    assert [format_value(value) for value in ((0.5, 0.75), (), None)] == ["0.5 0.75", "", ""]
