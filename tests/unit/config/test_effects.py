"""An option of the user that would have no effect is an error; one of a config that is overridden is not."""

import pytest

from convolve.cli import train
from convolve.config.effects import computes_in_fp32
from convolve.config.loading import build, resolve
from convolve.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"enable_half_partials": True}, "--enable-half-partials: has no effect, fp32 accumulates in fp32; add"),
        ({"stochastic_rounding": True, "precision": "32.32"}, "--stochastic-rounding: has no effect, fp32 results"),
        (
            {"saturate_on_overflow": True, "precision_mode": "must_keep_origin_dtype"},
            "--saturate-on-overflow: has no effect",
        ),
        ({"initial_loss_scaling": 4}, "--initial-loss-scaling 4: has no effect, the loss scale is constant; add"),
        ({"initial_loss_scaling": 4, "device_model": "ipu-mk2"}, "--initial-loss-scaling 4: has no effect"),
        (
            {"loss_scaling": 8, "loss_scaling_rule": "dynamic"},
            "--loss-scaling 8 with --loss-scaling-rule dynamic: has no effect, the rule finds the scale; use",
        ),
        (
            {"loss_scaling": 8, "loss_scaling_rule": "automatic", "initial_loss_scaling": 4},
            "--loss-scaling 8 with --initial-loss-scaling 4: both are the first scale of the automatic rule; omit one",
        ),
        ({"momentum": 0.9, "optimizer": "sgd"}, "--momentum 0.9 with --optimizer sgd: has no effect; use --optimizer"),
        ({"momentum": 0.9, "optimizer": "adamw"}, "--momentum 0.9 with --optimizer adamw: has no effect; use --adam-b"),
    ],
)
def test_an_option_without_effect_is_rejected(given, problem):
    with pytest.raises(ConfigError) as error:
        resolve(None, None, given)
    assert str(error.value).startswith(problem)


@pytest.mark.parametrize(
    "given",
    [
        {"enable_half_partials": True, "precision": "16.32"},
        {"enable_half_partials": True, "device_model": "ipu-mk1"},
        {"enable_half_partials": False},
        {"stochastic_rounding": True, "precision_mode": "force_fp16"},
        {"initial_loss_scaling": 4, "loss_scaling": 8, "loss_scaling_rule": "ramp"},
        {"initial_loss_scaling": 4, "device_model": "ascend-910"},
        {"loss_scaling": 8, "loss_scaling_rule": "automatic"},
        {"momentum": 0, "optimizer": "sgd"},
        {"momentum": 0.9, "optimizer": "lars"},
    ],
)
def test_an_option_with_an_effect_is_accepted(given):
    assert resolve(None, None, given).config


def test_overriding_the_formats_of_a_config_drops_its_16_bit_options():
    assert resolve("mk2_resnet50_gn_16ipus", None, {}).config.precision.enable_half_partials
    assert computes_in_fp32(resolve("mk2_resnet50_gn_16ipus", None, {"precision": "32.32"}).config)


def test_a_stored_config_is_accepted_as_it_is():
    assert build({"enable_half_partials": True, "momentum": 0.9, "optimizer": "sgd"})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--optimiser SGD --momentum .9", "--momentum .9 with --optimizer SGD: has no effect"),
        ("--config cnn-wide-mnist --momentum .9", "--momentum 0.9 with --optimizer sgd: has no effect"),
        ("--half-partial", "--enable-half-partials: has no effect"),
        ("--initial-loss-scaling 16", "--initial-loss-scaling 16: has no effect"),
        ("--initial-loss-scaling 16 --loss-scaling 8", "--initial-loss-scaling 16 with --loss-scaling 8: a ramp must"),
    ],
)
def test_a_command_line_is_checked(words, problem):
    with pytest.raises(ConfigError) as error:
        train.run(words.split())
    assert str(error.value).startswith(problem)
