import pytest

from convolve.compat.programs import PROGRAMS, STORED, translate_program
from convolve.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "old", "ours"),
    [
        ("validate", ["--restore-path", "runs/a", "--batch-size", "25"], ["runs/a", "--batch-size", "25"]),
        ("validate", ["--all", "--checkpoint-path=runs/a"], ["runs/a", "--all"]),
        ("validate", ["runs/a", "--imagenet-data-path", "d"], ["runs/a", "--data-dir", "d"]),
        ("restore", ["--restore_path", "runs/a", "--epochs", "3"], ["runs/a", "--epochs", "3"]),
        ("average", ["--restore-path", "runs/a", "--weight-avg-N", "2"], ["runs/a", "-N", "2"]),
        ("predict", ["--img", "3.png", "--save_dir", "runs/a"], ["runs/a", "3.png"]),
        ("data", ["prepare", "--target", "b", "--source", "a"], ["prepare", "a", "b"]),
        (
            "launch",
            ["--host", "a,b", "--", "train", "--vipu-partition"],
            ["--hosts", "a,b", "--", "train", "--vipu-partition"],
        ),
    ],
)
def test_an_old_option_becomes_a_flag_or_an_argument_in_its_place(command, old, ours):
    assert translate_program(command, old) == ours


@pytest.mark.parametrize("option", ["--model", "--no-stochastic-rounding", "--num_ipus", "--config", "--batch-norm"])
def test_a_training_option_is_rejected_if_the_checkpoint_contains_it(option):
    with pytest.raises(ConfigError) as caught:
        translate_program("validate", ["runs/a", option, "1"])
    assert str(caught.value).endswith(f"is not offered by convolve validate: {STORED}")


@pytest.mark.parametrize(
    ("command", "name"), [(command, name) for command, program in PROGRAMS.items() for name in program.refused]
)
def test_an_option_without_a_counterpart_is_rejected_with_its_reason(command, name):
    with pytest.raises(ConfigError) as caught:
        translate_program(command, [f"--{name}", "1"])
    assert str(caught.value) == f"--{name} is not offered by convolve {command}: {PROGRAMS[command].refused[name]}"


def test_an_unknown_option_is_left_to_the_parser():
    assert translate_program("validate", ["runs/a", "--jsn"]) == ["runs/a", "--jsn"]
