import pytest

from convolve.cli.command import Parser, add_config_flags, explicit_options, format_value, model_in, read_config
from convolve.cli.train import read_options as read_train_options
from convolve.errors import ConfigError


def parse(*arguments):
    parser = Parser("train", "Train a model.")
    add_config_flags(parser, model_in(arguments))
    return parser.parse(arguments)


def test_no_arguments_are_no_options_and_the_default_config():
    """`convolve train` alone is the first command that users type."""
    assert model_in([]) is None
    assert explicit_options(parse()) == {}
    assert read_config(parse()).name == "lenet-mnist"


@pytest.mark.parametrize(
    "arguments", [["--model", "resnet18"], ["--model=resnet18"], ["--seed", "1", "--model", "resnet18"]]
)
def test_the_model_is_found_before_parsing(arguments):
    assert model_in(arguments) == "resnet18"


def test_only_explicit_options_are_returned():
    assert explicit_options(parse("--seed", "3", "--no-logs")) == {"seed": "3", "logs": False}


def test_none_unsets_an_optional_value():
    assert explicit_options(parse("--keep-checkpoints", "none")) == {"keep_checkpoints": None}


def test_lists_are_separated_by_blanks_or_commas():
    commas, blanks = parse("--learning-rate-schedule", "0.5,0.75"), parse("--learning-rate-schedule", "0.5", "0.75")
    assert explicit_options(commas) == explicit_options(blanks) == {"learning_rate_schedule": ["0.5", "0.75"]}


def test_a_model_alone_does_not_start_from_the_default_config():
    config = read_config(parse("--model", "lenet5", "--seed", "2"))
    assert (config.name, config.model.model, config.run.seed) == ("custom", "lenet5", 2)


def test_overrides_and_a_second_config_replace_those_of_the_command_line():
    options = parse("--config", "lenet-mnist", "--seed", "2", "--batch-size", "8")
    config = read_config(options, "lenet-digits", batch_size=16)
    assert (config.name, config.run.seed, config.optim.batch_size) == ("lenet-digits", 2, 16)


def test_an_unknown_option_names_the_command_and_the_closest_option():
    with pytest.raises(ConfigError, match=r"^convolve train: unknown option --sed; did you mean --seed"):
        parse("--sed=3")


def test_numbers_and_switches_are_formatted_differently():
    assert [format_value(value) for value in (1, True, 0, False)] == ["1", "on", "0", "off"]


def test_lists_are_formatted_as_typed_and_none_is_empty():
    assert [format_value(value) for value in ((0.5, 0.75), (), None)] == ["0.5 0.75", "", ""]


def test_help_for_a_model_lists_its_options_first_and_hides_those_of_other_families(capsys):
    with pytest.raises(SystemExit):
        parse("--model", "resnet50", "--help")
    text = capsys.readouterr().out
    assert text.index("--last-gamma-zero") < text.index("--data-dir PATH")
    assert "--expand-ratio" not in text


def test_published_weights_select_their_model_if_nothing_else_does():
    def model_of(*words):
        return read_config(read_train_options(words)).model.model

    assert model_of("--weights", "timm:tf_efficientnet_lite0.in1k") == "efficientnet-lite0"
    assert model_of("--weights", "resnet50", "--model", "resnet18") == "resnet18"
    assert model_of("--weights", "resnet50", "--config", "lenet-digits") == model_of("--config", "lenet-digits")
    assert model_of("--init-path", "file.safetensors") == model_of()
